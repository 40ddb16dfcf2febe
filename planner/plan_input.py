"""Reading a batch, its environment and limits from JSON or from lists on a command line, with errors that say where."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from .batch import Batch
from .environment import Environment, Limits
from .errors import BadInput

LENGTHS = ("query_lens", "seq_lens", "prefill_lens", "cached_lens", "is_prefilling", "seq_lens_lower")
SETTINGS = ("decode_threshold", "short_extends_as_decodes", "num_tokens")
PARTS = ("environment", "limits")

Part = TypeVar("Part", Environment, Limits)


class PlanInput(NamedTuple):
    """What a plan is asked for."""

    batch: Batch
    environment: Environment
    limits: Limits


def read_input(text: str | bytes) -> PlanInput:
    """Read the JSON form. Only `query_lens` and `seq_lens` have to be there. Raises `BadInput` naming the place."""
    return from_mapping(_decoded(text))


def _decoded(text: str | bytes) -> Any:
    """JSON, and what other writers pass off as JSON: NaN, Infinity and huge numbers, refused later by their place."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            return json.loads(text if isinstance(text, str) else text.decode())
        except (ValueError, RecursionError):
            raise BadInput(f"input: expected one JSON object, got: {error}") from error


def read_lists(lists: Mapping[str, str | None], settings: Iterable[str] = (), **rest: Any) -> PlanInput:
    """Read lengths from texts such as `1,1,40` (flags `0,1,1`), and settings such as `environment.gfx=gfx942`.

    `rest`: `decode_threshold` and the like, as values; `None` stands for the default.
    """
    data: dict[str, Any] = {name: _numbers(name, text) for name, text in lists.items() if text is not None}
    data |= {name: value for name, value in rest.items() if value is not None}
    for setting in settings:
        name, equals, value = setting.partition("=")
        part, dot, key = name.strip().partition(".")
        if not (equals and dot and key) or part not in PARTS:
            raise BadInput(f"{setting!r}: expected environment.NAME=VALUE or limits.NAME=VALUE")
        data.setdefault(part, {})[key] = _value(value.strip())
    return from_mapping(data)


def from_mapping(data: Any) -> PlanInput:
    """The decoded JSON form, validated."""
    if not isinstance(data, dict):
        raise BadInput(f"input: expected a JSON object, got {_kind(data)}")
    _known_keys("input", data, (*LENGTHS, *SETTINGS, *PARTS))
    for name in LENGTHS[:2]:
        if data.get(name) is None:
            raise BadInput(f"{name}: expected a list of integers, one a request; it is missing")
    for name in LENGTHS:
        if not isinstance(data.get(name), list | None):
            raise BadInput(f"{name}: expected a list, got {_kind(data[name])}")
    given = {name: data[name] for name in (*LENGTHS, *SETTINGS) if data.get(name) is not None}
    environment = _part("environment", data.get("environment"), Environment)
    limits = _part("limits", data.get("limits"), Limits)
    return PlanInput(Batch.from_lengths(**given), environment, limits)


def _part(name: str, data: Any, kind: type[Part]) -> Part:
    if data is None:
        return kind()
    if not isinstance(data, dict):
        raise BadInput(f"{name}: expected an object, got {_kind(data)}")
    _known_keys(name, data, kind.__struct_fields__)
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise BadInput(_located(name, data, str(error))) from error


def _located(name: str, data: Mapping[str, Any], text: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.num_cu`" as "environment.num_cu: expected int, got str"."""
    message, _, path = text.partition(" - at `$")
    key = path.strip("`").lstrip(".")
    if not path:
        return f"{name}.{message}"  # a check of ours, which names the key itself
    message = message.replace("`", "")
    if message.startswith("Invalid enum value"):
        choices = _choices(Environment if name == "environment" else Limits, key)
        message = f"expected {' or '.join(choices)}, got {data[key]!r}"
    return f"{name}.{key}: {message[0].lower()}{message[1:]}"


def _choices(kind: type[Environment] | type[Limits], key: str) -> list[str]:
    """The literals of a key, from the schema that msgspec derives."""
    schema = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"][key]
    return [str(choice) for choice in schema.get("enum", ())]


def _known_keys(name: str, data: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
            raise BadInput(f"{name}: unknown key {key!r}{hint}")


def _numbers(name: str, text: str) -> list[Any]:
    out: list[Any] = []
    for index, item in enumerate(text.split(",") if text.strip() else []):
        word = item.strip()
        try:
            out.append(bool(int(word)) if name == "is_prefilling" and word in ("0", "1") else int(word))
        except ValueError:
            raise BadInput(f"{name}[{index}]: expected an integer, got {word!r}") from None
    return out


def _value(text: str) -> Any:
    """A setting's value: JSON where it reads as JSON, else the text itself."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return text if isinstance(value, float) else value  # no setting is one, but a version such as 0.32 reads as one


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
