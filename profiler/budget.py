"""Budgets: what a step of a batch class may cost, from a TOML file or from `CLASS:FIGURE=LIMIT`.

    [budget.decode]            # "*" = every class without a table of its own
    syncs = 0
    launches = 60
    phases = ["build", "forward"]
    stat = "max"

    [[allow]]
    site = "model_runner.py:_sync_lengths"
    reason = "upstream, fixed in the next release"
    until = 2027-03-01

Judging a report by a budget is `gate.check`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from ..errors import BadInput
from .report import Site

SYNC_KINDS = ("d2h", "h2d", "stream", "device", "event", "memset")
FIGURES = (
    "syncs",  # all kinds; `maybe` is apart
    *SYNC_KINDS,
    "maybe",
    "copies",  # d2h + h2d
    "copies_d2h",
    "copies_h2d",
    "copies_d2d",
    "d2h_bytes",
    "h2d_bytes",
    "launches",  # kernels + graphs
    "kernels",
    "graphs",
    "captured",
    "blocked_us",
    "duration_us",
    "build_us",
    "host_ops",
)
STATS = ("max", "p99", "p50", "mean")
EXEMPTIONS = ("warmup", "compile", "capture", "other_threads", "allowed_upstream")
DEFAULT_EXEMPT = frozenset(EXEMPTIONS) - {"allowed_upstream"}
WHOLE_STEP = ("*",)
ANY_CLASS = "*"
_SETTINGS = ("phases", "stat", "exempt", "optional")


class ClassBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one batch class (`*` = every class but `other_than`).

    `limits`: figure name to the highest value allowed. `phases`: None = build + forward, or the whole step where it has
    neither; `("*",)` = the whole step. `exempt`: what is not counted. `optional`: a class without steps passes.
    """

    batch_class: str
    limits: dict[str, float]
    where: str = "budget"
    phases: tuple[str, ...] | None = None
    stat: str = "max"
    exempt: frozenset[str] = DEFAULT_EXEMPT
    optional: bool = False
    other_than: frozenset[str] = frozenset()


class Allow(msgspec.Struct, frozen=True, kw_only=True):
    """A known site that does not count, with the reason, and the day after which it counts again and fails."""

    site: str  # "file.py:function"; the file may have folders in front, * and ? match
    reason: str
    until: date | None = None
    kind: str | None = None
    where: str = "allow"

    def matches(self, site: Site) -> bool:
        """Whether `site` is the function this entry names: by the end of its path and the end of its qualified name."""
        if self.kind is not None and site.kind != self.kind:
            return False
        file, _, function = self.site.rpartition(":")
        wanted = PurePosixPath(file).parts
        parts = PurePosixPath(site.file).parts[-len(wanted) :]
        if len(parts) != len(wanted) or not all(fnmatchcase(p, w) for p, w in zip(parts, wanted, strict=True)):
            return False
        name = site.function.replace("<locals>.", "")
        return fnmatchcase(name, function) or fnmatchcase(name, f"*.{function}")

    def expired(self, today: date) -> bool:
        return self.until is not None and today > self.until


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    classes: tuple[ClassBudget, ...] = ()
    allow: tuple[Allow, ...] = ()

    def merged(self, other: Budget) -> Budget:
        """Both: the limits of each, and every allow-list entry for all of them."""
        return Budget(classes=self.classes + other.classes, allow=self.allow + other.allow)


def load_budget(path: str | Path) -> Budget:
    """Read a budget file. Raises `BadInput` that names the file and the key."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: expected TOML in UTF-8: {error.reason} at byte {error.start}") from error
    return parse_budget(text, where=str(path))


def parse_budget(text: str, where: str = "budget") -> Budget:
    """Parse a budget document. Raises `BadInput` that names the key (`b.toml: budget.decode.sync: unknown key ...`)."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{where}: expected TOML: {error}") from error
    _known(document, ("budget", "allow"), where)
    tables = document.get("budget", {})
    if not isinstance(tables, dict):
        raise BadInput(f"{where}: budget: expected tables such as [budget.decode], got {_kind(tables)}")
    named = frozenset(tables) - {ANY_CLASS}
    classes: list[ClassBudget] = []
    for name, table in tables.items():
        path = f"{where}: budget.{name}"
        several = table if isinstance(table, list) else [table]
        for i, one in enumerate(several):
            classes.append(_class_budget(name, one, f"{path}[{i}]" if isinstance(table, list) else path, named))
    entries = document.get("allow", [])
    if not isinstance(entries, list):
        raise BadInput(f"{where}: allow: expected [[allow]] entries, got {_kind(entries)}")
    allow = tuple(_allow(entry, f"{where}: allow[{i}]") for i, entry in enumerate(entries))
    if not classes and not allow:
        raise BadInput(f"{where}: expected at least one [budget.CLASS] table, got none")
    return Budget(classes=tuple(classes), allow=allow)


def parse_fail_on(specs: Iterable[str], where: str = "--fail-on") -> Budget:
    """Budgets in short form, `CLASS:FIGURE=LIMIT[,FIGURE=LIMIT...]` each: the maximum over the class's steps."""
    classes = []
    for spec in specs:
        expected = f"{where} {spec!r}: expected CLASS:FIGURE=LIMIT such as decode:syncs=0"
        name, colon, rest = spec.partition(":")
        if not colon or not name.strip():
            raise BadInput(f"{expected}, got no class")
        limits: dict[str, float] = {}
        for part in rest.split(","):
            figure, equals, text = (piece.strip() for piece in part.partition("="))
            if not equals:
                raise BadInput(f"{expected}, got {part.strip() or 'nothing'!r} after the class")
            _known([figure], FIGURES, f"{where} {spec!r}", noun="figure")
            try:
                number = float(text)
            except ValueError:
                raise BadInput(f"{where} {spec!r}: {figure}: expected a number, got {text!r}") from None
            limits[figure] = _limit(number, f"{where} {spec!r}: {figure}")
        classes.append(ClassBudget(batch_class=name.strip(), limits=limits, where=f"{where} {spec}"))
    return Budget(classes=tuple(classes))


def _class_budget(name: str, table: Any, where: str, named: frozenset[str]) -> ClassBudget:
    if not isinstance(table, dict):
        raise BadInput(f"{where}: expected a table of limits, got {_kind(table)}")
    _known(table, (*FIGURES, *_SETTINGS), where)
    limits = {key: _limit(value, f"{where}.{key}") for key, value in table.items() if key in FIGURES}
    if not limits:
        raise BadInput(f"{where}: expected a limit such as syncs = 0, got none")
    stat = table.get("stat", "max")
    if not isinstance(stat, str) or stat not in STATS:
        raise BadInput(f"{where}.stat: expected one of {', '.join(STATS)}, got {stat!r}")
    optional = table.get("optional", False)
    if not isinstance(optional, bool):
        raise BadInput(f"{where}.optional: expected true or false, got {_kind(optional)}")
    phases = _strings(table["phases"], f"{where}.phases") if "phases" in table else None
    if phases is not None and not phases:
        raise BadInput(f'{where}.phases: expected at least one phase, or ["*"] for the whole step, got none')
    exempt = DEFAULT_EXEMPT
    if "exempt" in table:
        exempt = frozenset(_strings(table["exempt"], f"{where}.exempt"))
        _known(exempt, EXEMPTIONS, f"{where}.exempt", noun="exemption")
    return ClassBudget(
        batch_class=name,
        limits=limits,
        where=where,
        phases=phases,
        stat=stat,
        exempt=exempt,
        optional=optional,
        other_than=named if name == ANY_CLASS else frozenset(),
    )


def _allow(entry: Any, where: str) -> Allow:
    if not isinstance(entry, dict):
        raise BadInput(f"{where}: expected a table with site and reason, got {_kind(entry)}")
    _known(entry, ("site", "reason", "until", "kind"), where)
    for key in ("site", "reason"):
        if not isinstance(entry.get(key), str) or not entry[key].strip():
            got = "an empty one" if isinstance(entry.get(key), str) else _kind(entry.get(key))
            raise BadInput(f"{where}.{key}: expected a text, got {got}")
    kind = entry.get("kind")
    if kind is not None and kind not in (*SYNC_KINDS, "maybe"):
        raise BadInput(f"{where}.kind: expected one of {', '.join(SYNC_KINDS)}, maybe; got {kind!r}")
    return Allow(
        site=parse_site(entry["site"], f"{where}.site"),
        reason=entry["reason"].strip(),
        until=_day(entry.get("until"), f"{where}.until"),
        kind=kind,
        where=where,
    )


def parse_site(text: str, where: str) -> str:
    """A site of an allow-list, stripped. Raises `BadInput` unless it is file.py:function."""
    file, _, function = text.strip().rpartition(":")
    if not file or not function:
        raise BadInput(f"{where}: expected file.py:function, got {text.strip()!r}")
    if function.isdigit():
        raise BadInput(f"{where}: expected file.py:function (lines move), got line {function}")
    return text.strip()


def _day(value: Any, where: str) -> date | None:
    if value is None:
        return None
    if isinstance(value, datetime):
        return value.date()
    if isinstance(value, date):
        return value
    if isinstance(value, str):
        try:
            return date.fromisoformat(value)
        except ValueError:
            pass
    raise BadInput(f"{where}: expected a date such as 2027-03-01, got {value!r}")


def _limit(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInput(f"{where}: expected a number, got {_kind(value)}")
    if not math.isfinite(value) or value < 0:
        raise BadInput(f"{where}: expected a number >= 0, got {value}")
    return value


def _strings(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise BadInput(f"{where}: expected a list of names, got {_kind(value)}")
    return tuple(value)


def _known(keys: Mapping[str, Any] | Iterable[str], known: Sequence[str], where: str, noun: str = "key") -> None:
    for key in keys:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            guess = f" (did you mean {near[0]}?)" if near else f" (expected one of {', '.join(known)})"
            place = f"{where}.{key}" if noun == "key" and ": " in where else f"{where}: {key}"
            raise BadInput(f"{place}: unknown {noun}{guess}")


def _kind(value: Any) -> str:
    if value is None:
        return "none"
    names = {bool: "a boolean", str: "a text", dict: "a table", list: "a list", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
