"""The table and the plot of `cases.py`, written from its results and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

FIELD = {
    "case1": "field report (MI350, DeepSeek-V3 with MTP, TP8): median TTFT -25.9 %, P99 -14.4 %, throughput +3.2 %",
    "case2": "field report: decode latency -2 to -3 %",
    "case3": "field reports: x1.2 to x1.5 with it; later 1.4 to 1.6 times slower at high concurrency",
}
KINDS = {"chunked": "chunk with context", "causal": "first chunk", "decode": "decode step"}
INK, FAINT = "#24292f", "#8b949e"
COLOURS = {"after": "#54aeff", "after, guard off": "#d4a72c", "ours": "#1a7f37"}


def write(file: Path) -> None:
    """`cases.md` and `cases.svg` beside the results."""
    result = json.loads(file.read_text())
    file.with_suffix(".md").write_text("\n".join(_page(result)) + "\n")
    file.with_suffix(".svg").write_text(_plot(result))


def runs_of(result: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(case, title, run) of everything that has variants."""
    if "case1" in result:
        yield "case1", "Case 1: FP8 prefill metadata on chunked prefill (MLA)", result["case1"]
    if "case2" in result:
        yield "case2", "Case 2: lengths copied to the host, steady decode (FA)", result["case2"]["steady"]
        yield "case2", "Case 2: the same builders, prompts beside decode (FA)", result["case2"]["serving"]


def saved(run: dict[str, Any], name: str) -> dict[str, float]:
    """Milliseconds a step that `name` saves over `before`, by kind."""
    before, its = run["variants"]["before"]["step_ms"], run["variants"][name]["step_ms"]
    return {kind: before[kind] - its[kind] for kind in KINDS if kind in before and kind in its}


def spread(run: dict[str, Any], kind: str) -> float | None:
    """How far the medians of one builder's own rounds lie apart at most, in milliseconds; None with one round."""
    apart = [
        max(rounds) - min(rounds)
        for told in run["variants"].values()
        if len(rounds := told["step_ms_of_rounds"].get(kind, [])) > 1
    ]
    return max(apart, default=None)


def _page(result: dict[str, Any]) -> Iterator[str]:
    yield "# The three field cases"
    yield ""
    yield f"{result['device']}; {', '.join(f'{k} {v}' for k, v in result['versions'].items() if v)}; "
    yield f"`{result['command']}`. Written from `cases.json`."
    if result["smoke"]:
        yield ""
        yield "**Smoke run: tiny shapes on a simulated device. The counts hold, no time here means anything.**"
    for case, title, run in runs_of(result):
        yield from _case(case, title, run)
    if "case3" in result:
        yield from _third(result["case3"])
    if result.get("failures"):
        yield ""
        yield "## Failed"
        yield from (f"- {failure}" for failure in result["failures"])


def _case(case: str, title: str, run: dict[str, Any]) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    s = run["sizes"]
    yield (
        f"{s['layers']} layers' worth of kernels, hidden {s['hidden']}, chunks of {s['chunk']}, prompts of "
        f"{s['prompt']}; {s['concurrency']} requests at once, {run['rounds']} round(s). Beside the {FIELD[case]}."
    )
    kinds = [kind for kind in KINDS if kind in run["variants"]["before"]["step_ms"]]
    yield ""
    yield "| builder | " + " | ".join(f"{KINDS[k]}: ms, saved, syncs" for k in kinds) + " | same tokens |"
    yield "|---|" + "---|" * (len(kinds) + 1)
    tokens = run["variants"]["before"]["tokens_sha256"]
    for name, told in run["variants"].items():
        cells = [_step_cell(run, name, kind) for kind in kinds]
        same = "yes" if told["tokens_sha256"] == tokens else "NO"
        yield f"| {name} ({told['what']}) | {' | '.join(cells)} | {same} |"
    apart = {KINDS[kind]: spread(run, kind) for kind in kinds}
    if any(ms is not None for ms in apart.values()):
        yield ""
        listed = ", ".join(f"{ms:.3f} ms ({kind})" for kind, ms in apart.items() if ms is not None)
        yield f"Rounds of one builder lie apart by up to {listed}: what is less than that is noise."
    yield ""
    yield " ".join(_verdict(run, kind) for kind in kinds)
    if "ttft_ms" in run["variants"]["before"]:
        yield from _serving(run)


def _verdict(run: dict[str, Any], kind: str) -> str:
    """Whether ours saves at least what upstream's mend does, beyond what rounds of one builder differ by."""
    ours, mend = (saved(run, name)[kind] for name in ("ours", "after"))
    noise = spread(run, kind)
    if noise is None:
        return f"{KINDS[kind].capitalize()}: one round, so no verdict."
    says = "more than" if ours > mend + noise else "LESS than" if ours < mend - noise else "as much as"
    return f"{KINDS[kind].capitalize()}: ours saves {says} the mend."


def _step_cell(run: dict[str, Any], name: str, kind: str) -> str:
    told = run["variants"][name]
    counts = told["counts"]["by_kind"].get(kind, {})
    ms = told["step_ms"].get(kind)
    if ms is None:
        return "-"
    less = saved(run, name)[kind]
    gain = "" if name == "before" else f", {less:+.3f} ({less / (ms + less):+.1%})"
    return f"{ms:.3f}{gain}, {counts.get('syncs', '?')}"


def _serving(run: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "| builder | TTFT median | TTFT P99 | TPOT | E2EL | tokens/s | drafts accepted |"
    yield "|---|---|---|---|---|---|---|"
    before = run["variants"]["before"]
    for name, told in run["variants"].items():
        cells = []
        for read in (lambda v: v["ttft_ms"]["median"], lambda v: v["ttft_ms"]["p99"], _tpot, _e2el, _rate):
            change = "" if name == "before" else f" ({read(told) / read(before) - 1:+.1%})"
            cells.append(f"{read(told):.2f}{change}")
        accepted = "-" if told["acceptance"] is None else f"{told['acceptance']:.3f}"
        yield f"| {name} | {' | '.join(cells)} | {accepted} |"
    control = run["control"]
    noticed = "other tokens" if control["noticed"] else "THE SAME TOKENS"
    yield ""
    yield f"Milliseconds. Control, the context read wrong on purpose: {noticed}" + (
        "." if control["acceptance"] is None else f", {control['acceptance']:.3f} of the drafts accepted."
    )


def _tpot(told: dict[str, Any]) -> float:
    return float(told["tpot_ms"])


def _e2el(told: dict[str, Any]) -> float:
    return float(told["e2el_ms"])


def _rate(told: dict[str, Any]) -> float:
    return float(told["tokens_per_s"])


def _third(case: dict[str, Any]) -> Iterator[str]:
    yield from ("", "## Case 3: persistent MLA decode", "", f"{FIELD['case3']}.", "")
    yield "| builder | rows | work buffers filled | launches | syncs | host us | kernel by our plan |"
    yield "|---|---|---|---|---|---|---|"
    for name, told in case["builders"].items():
        for rows, row in told.items():
            if rows != "what":
                filled = f"{len(row['filled'])} of 6"
                figures = (row["launches"], row["syncs"], row["build_us"], row.get("route", ""))
                cells = (f"{name} ({told['what']})", rows, filled, *figures)
                yield f"| {' | '.join(map(str, cells))} |"
    yield ""
    replayed = f" Timings replayed from `{case['replayed']}`." if "replayed" in case else ""
    yield f"Milliseconds of a step of {case['layers']} layers, scheduling included.{replayed}"
    yield f"The route's data: {case['route_data']}."
    yield ""
    yield "| heads, query | lengths | persistent | best fixed (splits) | route's choice | off the best kernel by |"
    yield "|---|---|---|---|---|---|"
    for row in case["kernels"]:
        yield (
            f"| {row['heads']}, {row['query_len']} | {row['lengths']} | {row['persistent_ms']:.3f} "
            f"| {row['fixed_ms']:.3f} ({row['fixed_splits']}) | {row['route_ms']:.3f} ({row['route']}) "
            f"| {row['route_off_by']:.1%}{'' if row['block_timed'] else ', block size not timed before'} |"
        )
    yield ""
    known = sum(row["block_timed"] for row in case["kernels"])
    yield f"{known} shapes of block sizes with data; on {len(case['misses'])} the choice is more than 3 % off the best."


# --------------------------------------------------------------------- plot


def _plot(result: dict[str, Any]) -> str:
    """Milliseconds a step saved over `before`: a group of bars a kind of step, all to one scale, noise as a band."""
    groups = [(title, run, kind) for _, title, run in runs_of(result) for kind in saved(run, "ours")]
    bars_of = [
        {name: saved(run, name)[kind] for name in run["variants"] if name != "before"} for _, run, kind in groups
    ]
    noises = [spread(run, kind) or 0.0 for _, run, kind in groups]
    least = min((min(bars.values()) for bars in bars_of), default=0.0)
    most = max((max(bars.values()) for bars in bars_of), default=0.0)
    low, high = min(0.0, least, *(-noise for noise in noises)), max(1e-9, most, *noises)
    scale = 440 / (high - low)
    zero = 220 - low * scale
    body, y = [], 50
    for (title, _, kind), bars, noise in zip(groups, bars_of, noises, strict=True):
        body.append(_text(10, y, f"{title.split(':')[0]}, {KINDS[kind]}:{title.partition(':')[2]}", INK, 600))
        body.append(
            f'<rect x="{zero - noise * scale:.1f}" y="{y + 16}" width="{max(1.0, 2 * noise * scale):.1f}" '
            f'height="{20 * len(bars) + 2}" fill="#eaeef2"/>'
        )
        for name, ms in bars.items():
            y += 20
            width = max(1.0, abs(ms) * scale)
            left = zero if ms >= 0 else zero - width
            body.append(_text(200, y + 11, name, INK, anchor="end"))
            body.append(f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="14" fill="{COLOURS[name]}"/>')
            body.append(_text(max(left + width, zero + noise * scale) + 6, y + 11, f"{ms:+.3f} ms", FAINT))
        y += 44
    head = "Milliseconds a step saved over upstream's file before its mend; grey: what rounds of one builder differ by"
    if result["smoke"]:
        head += " (smoke run: no time here means anything)"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 {y + 10}" font-family="system-ui, sans-serif" '
            'font-size="12">',
            f'<rect width="780" height="{y + 10}" fill="#ffffff"/>',
            _text(10, 22, head, INK, 600),
            *body,
            _text(10, y, result["device"], FAINT),
            "</svg>",
            "",
        ]
    )


def _text(x: float, y: float, text: str, fill: str, weight: int = 400, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{fill}" font-weight="{weight}" text-anchor="{anchor}">{escape(text)}</text>'
    )
