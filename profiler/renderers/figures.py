"""Charts of a report as plotly figure specifications: plain data, drawn by plotly.js in the page.

Readable without colour: classes differ by marker, lines by dash, and every axis and legend says what it shows. Colours
are those of Okabe and Ito (2008), which people with any colour vision tell apart.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

from ..report import Report, Site, Step
from ..sites import short_path
from .time_axis import TimeAxis

Spec = dict[str, Any]

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_CLASSES = ("decode", "extend", "chunked_prefill", "causal_prefill", "unknown", "empty")
_POINTS = 4000  # of one chart: a page with a hundred thousand would not scroll
_RANKS = 8
_SITES = 12
_LABEL = 50


class Figure(msgspec.Struct, frozen=True):
    """One chart: an id, a heading, what it shows in a sentence, and plotly's data and layout."""

    id: str
    title: str
    caption: str
    data: list[Spec]
    layout: Spec


def figures_of(report: Report) -> list[Figure]:
    """The charts that the report has figures for."""
    made = [_durations(report), _syncs(report), _sites(report), _lead(report), *_telemetry(report)]
    return [figure for figure in made if figure is not None]


def _layout(x: str, y: str, height: int = 340, **more: Any) -> Spec:
    axis = {"gridcolor": "#ddd", "zerolinecolor": "#999", "automargin": True}
    base: Spec = {
        "height": height,
        "margin": {"l": 56, "r": 16, "t": 12, "b": 48},
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#1b1f24"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "#fff",
        "legend": {"orientation": "h", "y": 1.02, "x": 0, "yanchor": "bottom"},
        "hovermode": "closest",
        "xaxis": axis | {"title": {"text": x}},
        "yaxis": axis | {"title": {"text": y}},
    }
    for key, value in more.items():
        base[key] = base.get(key, {}) | value if isinstance(value, dict) else value
    return base


def _text(text: str) -> str:
    """Plotly reads tags in labels: names like `kernel<float>` would lose their arguments."""
    return html.escape(text, quote=False)


def _style(number: int) -> Spec:
    return {"color": _COLOURS[number % len(_COLOURS)], "symbol": _MARKERS[number % len(_MARKERS)]}


def _by_class(steps: Sequence[Step]) -> list[tuple[str, int, list[Step]]]:
    """(class, its fixed number for colour and marker, its steps)."""
    groups: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        groups[step.batch_class].append(step)
    names = sorted(groups, key=lambda name: (_CLASSES.index(name) if name in _CLASSES else len(_CLASSES), name))
    return [(name, _CLASSES.index(name) if name in _CLASSES else len(_CLASSES), groups[name]) for name in names]


def _thinned(steps: list[Step], limit: int) -> list[Step]:
    """Evenly spread ones of many; steps that waited are kept before others."""
    if len(steps) <= limit:
        return steps
    keep = {id(step) for step in [s for s in steps if s.syncs.total][: limit // 2]}
    rest = [step for step in steps if id(step) not in keep]
    room = limit - len(keep)
    keep |= {id(rest[i * len(rest) // room]) for i in range(room)}
    return [step for step in steps if id(step) in keep]


def _durations(report: Report) -> Figure | None:
    steps = [step for step in report.steps if step.duration_us is not None and not step.warmup]
    if not steps:
        return None
    share = max(200, _POINTS // 4)
    data: list[Spec] = []
    for name, number, members in _by_class(steps):
        shown = _thinned(members, share)
        data.append(
            {
                "type": "box",
                "name": _text(f"{name} ({len(members)})"),
                "x": [round((step.duration_us or 0) / 1e3, 4) for step in shown],
                "orientation": "h",
                "boxpoints": "all" if len(shown) <= 60 else "outliers",
                "jitter": 0.4,
                "pointpos": 0,
                "marker": _style(number) | {"size": 5, "opacity": 0.7},
                "line": {"color": _COLOURS[number % len(_COLOURS)]},
                "hovertemplate": "%{x} ms<extra>" + _text(name) + "</extra>",
            }
        )
    values = [step.duration_us or 0 for step in steps]
    scale: Spec = (
        {"type": "log", "dtick": "D2"}
        if min(values) > 0 and max(values) > 30 * min(values)
        else {"rangemode": "tozero"}
    )
    height = 150 + 60 * len(data)
    layout = _layout("step duration, ms", "", height, xaxis=scale, yaxis={"autorange": "reversed"}, showlegend=False)
    words = " The axis is logarithmic." if scale.get("type") == "log" else ""
    return Figure(
        id="durations",
        title="Step duration by batch class",
        caption=f"Boxes: quartiles and median; number of steps in brackets. Warm-up and capture are left out.{words}",
        data=data,
        layout=layout,
    )


def compared_durations(before: Report, after: Report) -> Figure | None:
    """Step durations of both reports by class: before is filled, after is open."""
    data: list[Spec] = []
    for side, report in (("before", before), ("after", after)):
        for name, number, members in _by_class([s for s in report.steps if s.duration_us is not None and not s.warmup]):
            shown = _thinned(members, _POINTS // 8)
            later = side == "after"
            data.append(
                {
                    "type": "box",
                    "name": _text(f"{name}, {side} ({len(members)})"),
                    "x": [round((step.duration_us or 0) / 1e3, 4) for step in shown],
                    "orientation": "h",
                    "boxpoints": "outliers",
                    "marker": {"symbol": "circle-open" if later else "circle", "color": _COLOURS[later], "size": 5},
                    "line": {"color": _COLOURS[later], "width": 3 if later else 1.5},
                    "fillcolor": "rgba(0,0,0,0)" if later else "rgba(0,114,178,0.3)",
                    "hovertemplate": "%{x} ms<extra>" + _text(f"{name}, {side}") + "</extra>",
                    "sort": (number, later),
                }
            )
    if not data:
        return None
    data.sort(key=lambda trace: trace.pop("sort"))
    layout = _layout("step duration, ms", "", 150 + 50 * len(data), showlegend=False)
    layout["yaxis"] |= {"autorange": "reversed"}
    layout["xaxis"] |= {"rangemode": "tozero"}
    caption = "Boxes: quartiles and median; filled is before, open is after; number of steps in brackets."
    return Figure(id="durations", title="Step duration, before and after", caption=caption, data=data, layout=layout)


def _syncs(report: Report) -> Figure | None:
    steps = [step for step in report.steps if step.syncs.total is not None]
    if not steps:
        return None
    several = len({step.rank for step in steps}) > 1
    ticks = _whole(max(step.index for step in steps))
    counts = _whole(max(step.syncs.total or 0 for step in steps)) | {"rangemode": "tozero"}
    data: list[Spec] = []
    for name, number, members in _by_class(steps):
        shown = _thinned(members, _POINTS // 4)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": _text(name),
                "x": [step.index for step in shown],
                "y": [step.syncs.total for step in shown],
                "text": [_step_text(step, several) for step in shown],
                "hovertemplate": "%{text}<br>%{y} syncs<extra></extra>",
                "cliponaxis": False,
                "marker": _style(number) | {"size": 9, "line": {"width": 1, "color": "#1b1f24"}},
            }
        )
    return Figure(
        id="syncs",
        title="Syncs over steps",
        caption="Every wait of the host for the device, sampling and fetching tokens included; one marker a step.",
        data=data,
        layout=_layout("step", "syncs", xaxis=ticks, yaxis=counts, showlegend=True),
    )


def _whole(most: int) -> Spec:
    """Ticks of an axis of whole numbers."""
    return {"dtick": 1} if most < 12 else {"tickformat": ",d"}


def _step_text(step: Step, several: bool) -> str:
    rank = f"rank {step.rank}, " if several else ""
    size = f", {step.num_reqs} requests" if step.num_reqs is not None else ""
    return _text(f"{rank}step {step.index}: {step.batch_class}{size}")


def site_label(site: Site) -> str:
    where = short_path(site.file) if site.line else ""
    return f"{where}:{site.line} {site.function}" if where else (site.function or site.api)


def _sites(report: Report) -> Figure | None:
    told = [site for site in report.sites if site.kind != "maybe" and site.blocked_us is not None]
    shown = sorted(told, key=lambda site: site.blocked_us or 0, reverse=True)[:_SITES]
    if not shown:
        return None
    labels = [f"{_text(_short_label(site))} [{site.kind}]" for site in shown]
    blocked: Spec = {
        "type": "bar",
        "orientation": "h",
        "name": "host blocked",
        "y": list(range(len(shown))),
        "x": [round((site.blocked_us or 0) / 1e3, 4) for site in shown],
        "marker": {"color": _COLOURS[0]},
        "hovertemplate": "%{x} ms host blocked<extra></extra>",
    }
    data = [blocked]
    if any(site.device_idle_us is not None for site in shown):
        data.append(
            blocked
            | {
                "name": "device idle after it",
                "x": [round((site.device_idle_us or 0) / 1e3, 4) for site in shown],
                "marker": {
                    "color": _COLOURS[4],
                    "pattern": {"shape": "/", "fgcolor": "#1b1f24", "bgcolor": _COLOURS[4]},
                },
                "hovertemplate": "%{x} ms device idle<extra></extra>",
            }
        )
    # The label stands above its bars, not beside them: on a telephone there is no room beside.
    notes = [
        {
            "x": 0,
            "y": row - 0.46,
            "xref": "paper",
            "xanchor": "left",
            "yanchor": "middle",
            "text": label,
            "showarrow": False,
            "align": "left",
            "font": {"size": 12},
        }
        for row, label in enumerate(labels)
    ]
    layout = _layout("milliseconds, all steps", "", 130 + 58 * len(shown), barmode="group", bargap=0.5)
    layout["yaxis"] |= {
        "autorange": False,
        "range": [len(shown) - 0.4, -0.8],
        "showticklabels": False,
        "showgrid": False,
        "zeroline": False,
    }
    layout["annotations"] = notes
    layout["margin"] = layout["margin"] | {"l": 16}
    layout["showlegend"] = len(data) > 1
    return Figure(
        id="sites",
        title="Sites that cost most",
        caption="Time the host stood still at a line and, striped, time the device then had nothing to do.",
        data=data,
        layout=layout,
    )


def _short_label(site: Site) -> str:
    """The label in a telephone's width: the folder goes first, then the end."""
    label = site_label(site)
    if len(label) > _LABEL and site.line:
        label = label.rpartition("/")[2]
    return label if len(label) <= _LABEL else label[: _LABEL - 1] + "…"


def _lead(report: Report) -> Figure | None:
    series = report.run_ahead.series
    ranks = sorted({point.rank for point in series})
    if len(series) < 2:
        return None
    axis = TimeAxis(report)
    zero = min(axis.at(point.rank, point.time_us) for point in series)
    data: list[Spec] = []
    for number, rank in enumerate(ranks[:_RANKS]):
        points = [point for point in series if point.rank == rank]
        times = [round((axis.at(rank, point.time_us) - zero) / 1e3, 3) for point in points]
        breaks = _breaks(times)
        name = f"rank {rank}, " if len(ranks) > 1 else ""
        for what, dash, values in (
            ("median", _DASHES[0], [point.median_us for point in points]),
            ("least", _DASHES[2], [point.min_us for point in points]),
        ):
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": f"{name}{what}",
                    "x": _broken(times, breaks),
                    "y": _broken([round(value / 1e3, 4) for value in values], breaks),
                    "line": {"dash": dash, "width": 2, "color": _COLOURS[number % len(_COLOURS)]},
                    "marker": {"symbol": _MARKERS[number % len(_MARKERS)], "size": 5 if len(points) < 60 else 3},
                    "hovertemplate": "%{x} ms: %{y} ms<extra>" + name + what + "</extra>",
                }
            )
    more = f" The first {_RANKS} of {len(ranks)} ranks." if len(ranks) > _RANKS else ""
    return Figure(
        id="lead",
        title="Launch lead",
        caption="How far ahead of the device the host launched. Near zero, the device waits for launches." + more,
        data=data,
        layout=_layout("time, ms", "lead, ms", yaxis={"rangemode": "tozero"}, showlegend=True),
    )


def _breaks(times: list[float]) -> list[int]:
    """Where nothing was launched for long: a line across it would show what nobody measured."""
    steps = sorted(after - before for before, after in pairwise(times))
    usual = max(10 * steps[len(steps) // 2], (times[-1] - times[0]) / 50) if steps else 0.0
    return [i + 1 for i, (before, after) in enumerate(pairwise(times)) if after - before > usual]


def _broken(values: list[float], breaks: list[int]) -> list[float | None]:
    result: list[float | None] = list(values)
    for at in reversed(breaks):
        result.insert(at, None)
    return result


_TELEMETRY = (
    ("utilisation_percent", "utilisation", "Device utilisation", "%"),
    ("power_watts", "power", "Device power", "W"),
)


def _telemetry(report: Report) -> list[Figure]:
    """Charts of what the device's management library told; ranks' samplers may see the same devices."""
    samplers = [report.telemetry] if "devices" in report.telemetry else list(report.telemetry.values())
    devices: dict[tuple[Any, Any], Spec] = {}
    for sampler in samplers:
        for device in sampler.get("devices") or [] if isinstance(sampler, dict) else []:
            if isinstance(device, dict) and isinstance(device.get("series"), dict):
                devices.setdefault((device.get("index"), device.get("name")), device)
    result = []
    for field, key, title, unit in _TELEMETRY:
        data = [
            _device_line(number, index, name, device["series"], field, unit)
            for number, ((index, name), device) in enumerate(devices.items())
            if any(value is not None for value in device["series"].get(field) or [])
        ]
        if data:
            layout = _layout("time, s", f"{key}, {unit}", 300, yaxis={"rangemode": "tozero"}, showlegend=True)
            caption = "Sampled beside the profile; a gap is a sample that the library did not give."
            result.append(Figure(id=key, title=title, caption=caption, data=data, layout=layout))
    return result


def _device_line(number: int, index: Any, name: Any, series: Spec, field: str, unit: str) -> Spec:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": _text(f"device {index}: {name}" if name else f"device {index}"),
        "x": series.get("t_s") or [],
        "y": series[field],
        "line": {"dash": _DASHES[number % len(_DASHES)], "color": _COLOURS[number % len(_COLOURS)], "width": 2},
        "marker": {"symbol": _MARKERS[number % len(_MARKERS)], "size": 5},
        "hovertemplate": f"%{{x}} s: %{{y}} {unit}<extra></extra>",
    }
