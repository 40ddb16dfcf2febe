"""A report for people at a terminal: per class, then the lines that wait, then what to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..report import Amount, ClassFigures, Distribution, Report, Site
from ..sites import short_path

_ORDER = ("decode", "extend", "chunked_prefill", "causal_prefill", "empty", "unknown")
_VERDICT = {"sync-free": ("sync-free", "bold green"), "syncs": ("syncs", "bold red"), "unknown": ("unknown", "yellow")}
_WIDE = 110  # from here on the device's side of a wait has columns of its own
PIPED_WIDTH = 140  # a pipe has no width; 80 columns would cut file names


def console(stderr: bool = False, width: int | None = None) -> Console:
    """A console that keeps whole file names when its output goes to a pipe or a file."""
    # No markup: names come from traces and users, and `[/]` or `:x:` in one is no wish for style.
    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)
    if width is None and not made.is_terminal and made.width <= 80:
        made = Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=PIPED_WIDTH)
    return made


def figure(value: Amount, digits: int = 0) -> str:
    """A number for a table cell; an unknown one is a dash, never 0."""
    if value is None:
        return "–"
    if digits == 0 and value == int(value):
        return f"{int(value)}"
    return f"{value:.{max(digits, 1)}f}"


def micros(value: Amount) -> str:
    if value is None:
        return "–"
    return f"{value / 1e3:.2f} ms" if value >= 1e3 else f"{value:.0f} µs"


def _spread(d: Distribution, narrow: bool = False) -> str:
    between = "/" if narrow else " / "
    return between.join(figure(v) for v in (d.p50, d.p99, d.max)) if d.max is not None else "–"


class ClassTable:
    """One row a batch class, laid out for the width there is.

    Syncs, copies and launches are of build + forward; step time is of the whole step.
    """

    def __init__(self, report: Report, title: str | None = None) -> None:
        self._report = report
        self._title = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = class_table(self._report, self._title)
        if Measurement.get(console, options.update(max_width=1000), table).maximum > options.max_width:
            table = class_table(self._report, self._title, narrow=True)
        yield table


def class_table(report: Report, title: str | None = None, narrow: bool = False) -> Table:
    """The table itself; `narrow` fits 80 columns: no frame, no copies."""
    shape: dict[str, Any] = {"box": None, "padding": (0, 1, 0, 0)} if narrow else {}
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", **shape)
    time = (lambda value: micros(value).replace(" ", "")) if narrow else micros
    table.add_column("batch class", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    table.add_column("syncs/step\np50/p99/max" if narrow else "syncs/step\np50 / p99 / max", justify="right")
    if not narrow:
        table.add_column("copies\n/step", justify="right")
    table.add_column("launch\n/step" if narrow else "launches\n/step", justify="right", no_wrap=True)
    for name in ("build\np50", "step\np50", "step\np99"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    names = sorted(report.classes, key=lambda n: (_ORDER.index(n) if n in _ORDER else len(_ORDER), n))
    for name in names:
        c: ClassFigures = report.classes[name]
        text, style = _VERDICT[c.verdict]
        table.add_row(
            name,
            str(c.steps),
            _spread(c.syncs_per_step, narrow),
            *([] if narrow else [figure(c.copies_per_step.p50)]),
            figure(c.launches_per_step.p50),
            time(c.build_us.p50),
            time(c.duration_us.p50),
            time(c.duration_us.p99),
            Text(text, style=style),
        )
    return table


def _site_line(site: Site) -> Text:
    line = Text()
    if site.file.startswith("<"):  # an operator or a built-in: there is no line to show
        line.append(site.function, style="bold")
        line.append(f" {site.api}, no Python frame", style="dim")
        return line
    where = f"{short_path(site.file)}:{site.line}" if site.file else f"(no stack) {site.api}"
    line.append(where, style="bold")
    if site.file:
        line.append(f" {site.function.rsplit('.', 1)[-1]}")
    if site.source:
        line.append(f"\n{site.source}", style="dim")
    return line


def mends(sites: list[Site]) -> list[Text]:
    """Each distinct hint once, with the lines it is for: ten sites of one kind need one mend."""
    lines: dict[str, list[str]] = {}
    for site in sites:
        if site.hint and site.file and site.phase not in ("sample", "output"):
            place = site.function if site.file.startswith("<") else f"{short_path(site.file)}:{site.line}"
            lines.setdefault(site.hint, []).append(place)
    made = []
    for hint, where in lines.items():
        text = Text("mend: ", style="cyan")
        text.append(f"{hint} ", style="default")
        text.append(f"({', '.join(dict.fromkeys(where))})", style="dim")
        made.append(text)
    return made


class SiteTable:
    """The lines at which the host waited, most often first, laid out for the width there is."""

    def __init__(self, sites: list[Site], top: int) -> None:
        self._sites = sites
        self._top = top

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _site_table(self._sites, self._top, options.max_width >= _WIDE)


def site_table(report: Report, top: int = 10) -> SiteTable | None:
    """None where the host waited nowhere."""
    sites = [s for s in report.sites if s.kind != "maybe"]
    return SiteTable(sites, top) if sites else None


def _device_columns(sites: list[Site]) -> dict[str, Callable[[Site], Amount]]:
    """What is known of the device's side of the waits."""
    columns: dict[str, Callable[[Site], Amount]] = {}
    if any(site.device_idle_us is not None for site in sites):
        columns["device idle"] = lambda site: site.device_idle_us
    if any(site.launch_lead_us is not None for site in sites):
        columns["launch lead"] = lambda site: site.launch_lead_us
    return columns


def _site_table(sites: list[Site], top: int, wide: bool) -> Table:
    device = _device_columns(sites)
    beside = device if wide else {}
    table = Table(title="where the host waits", title_justify="left", title_style="bold", header_style="bold")
    table.add_column("kind", no_wrap=True)
    table.add_column("phase", no_wrap=True)
    table.add_column("per step", justify="right")
    table.add_column("total", justify="right")
    table.add_column("blocked", justify="right", no_wrap=True)
    for name in beside:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("site", overflow="fold")
    for site in sites[:top]:
        table.add_row(
            site.kind,
            site.phase,
            figure(site.per_step, 1) + (" ×" if site.repeated else ""),
            str(site.count),
            micros(site.blocked_us),
            *(micros(value(site)) for value in beside.values()),
            _site_line(site) if wide else _site_line(site).append(_beneath(site, device), style="dim"),
        )
    if len(sites) > top:
        table.caption = f"and {len(sites) - top} more"
    return table


def _beneath(site: Site, device: dict[str, Callable[[Site], Amount]]) -> str:
    """The same in a line of its own, where there is no room for columns."""
    told = ", ".join(f"{name} {micros(value(site))}" for name, value in device.items())
    return f"\n{told}" if told else ""


def _run_ahead(report: Report) -> list[Text]:
    ahead = report.run_ahead
    if ahead.launch_lead_us.p50 is None and ahead.device_idle_us is None:
        return []
    lead = " / ".join(micros(value) for value in (ahead.launch_lead_us.p50, ahead.launch_lead_min_us))
    text = f"launch lead p50 / least: {lead}; device idle because the host waited: {micros(ahead.device_idle_us)}"
    return [Text(text)]


def _header(report: Report) -> Text:
    source = report.source
    parts = [source.engine or source.kind, source.device or "device unknown"]
    parts += [f"torch {source.torch}"] if source.torch else []
    parts += [f"ranks {len(source.ranks)}"] if len(source.ranks) > 1 else []
    parts += ["collectors " + ", ".join(source.collectors)] if source.collectors else []
    parts += ["PARTIAL"] if source.partial else []
    return Text(" · ".join(parts), style="dim")


def render_report(report: Report, title: str | None = None, top: int = 10) -> RenderableType:
    """The whole report as one renderable."""
    parts: list[RenderableType] = []
    if title:
        parts.append(Text(title, style="bold underline"))
    parts += [_header(report), ClassTable(report)]
    warm = sum(step.warmup for step in report.steps)
    if warm:
        parts.append(Text(f"{warm} warm-up, compile or capture steps are not judged", style="dim"))
    sites = site_table(report, top)
    if sites is not None:
        parts.append(sites)
        parts += mends([s for s in report.sites if s.kind != "maybe"][:top])
    parts += _run_ahead(report)
    if report.planner.mode != "off":
        p = report.planner
        parts.append(
            Text(f"planner {p.mode}: {figure(p.mismatches)} mismatches, {figure(p.unread)} fields filled but unread")
        )
    parts += render_notes(report)
    return Group(*parts)


def render_notes(report: Report) -> list[Text]:
    """What to know about the figures: hazards first in red, the rest in yellow."""
    made = []
    for note in sorted(report.notes, key=lambda note: note.kind != "hazard"):
        where = f" ({short_path(note.file)}{f':{note.line}' if note.line else ''})" if note.file else ""
        times = f" ×{note.count}" if note.count > 1 else ""
        style = "red" if note.kind == "hazard" else "yellow"
        made.append(Text.assemble((note.kind, style), f": {note.text}{where}{times}"))
    return made
