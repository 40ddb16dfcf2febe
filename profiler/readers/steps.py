"""Which named ranges of a trace are steps, what their names tell, and which phases lie in them.

Names seen in the field: PyTorch's `ProfilerStep#7`; vLLM's `execute_context_2(310)_generation_30(30)`, with detailed
annotations `execute_340_context_2(sq310sk950sqsq..sqsk..)_generation_30(sq30sk9411sqsq..sqsk..)` (sq: sum of query
lengths, sk: of sequence lengths), and the spelling of 2025, `execute_context_1(888_788544)_generation_0(0)` (sq and
sqsq); SGLang's `step[DECODE bs=32]` inside such an `execute_...`; `capture_32_DECODE` while a graph is captured;
`model_inference`; torchbench's `[param|model|0|0|0|measure|forward]`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

import msgspec

from ..windows import PhaseWindow, StepWindow
from .process_trace import Range

_STEP = re.compile(
    r"ProfilerStep(?:\*|#\d+)$|execute_\S|step\[.*\]$|capture_\S|model_inference$|\[param\|.*\|(?:warmup|measure)\|.*\]$"
)
_LENGTHS = r"\((?:sq(\d+)sk(\d+)(?:sqsq\d+sqsk\d+)?|(\d+)(?:_\d+)?)\)"
_VLLM = re.compile(rf"execute_(?:(\d+)_)?context_(\d+){_LENGTHS}_generation_(\d+){_LENGTHS}$")
_SGLANG = re.compile(r"step\[(\w+)(?: bs=(\d+))?(?: toks=(\d+))?")
_SGLANG_CLASS = {"DECODE": ("decode", False), "TARGET_VERIFY": ("decode", True), "IDLE": ("empty", False)}
# With VLLM_CUSTOM_SCOPES_FOR_PROFILING or VLLM_NVTX_SCOPES_FOR_PROFILING (vLLM 0.11 and later).
_PHASES = {
    "gpu_model_runner: preprocess": "build",
    "gpu_model_runner: forward": "forward",
    "gpu_model_runner: sample": "sample",
    "gpu_model_runner: bookkeep": "output",
    "gpu_model_runner: AsyncGPUModelRunnerOutput": "output",
}
# More tokens than this per generating request are no drafts: a preempted request is computed anew.
_MAX_SPECULATIVE = 17


class RangeFilter:
    """Which ranges are steps: "auto" (the names of the field), "none", or names and glob patterns of the user's."""

    def __init__(self, steps: str | Sequence[str] = "auto") -> None:
        self.named = () if steps in ("auto", "none") else ((steps,) if isinstance(steps, str) else tuple(steps))
        self.auto = steps == "auto"

    def matches(self, name: str, annotated: bool = True) -> bool:
        """Whether a range of this name is a step; `annotated` is false for an operator that only may be a range."""
        if self.auto:
            return _STEP.match(name) is not None
        return any(name == wanted or fnmatchcase(name, wanted) for wanted in self.named)


class Told(msgspec.Struct, frozen=True, gc=False):
    """What a step's name says about its batch."""

    batch_class: str = "unknown"
    coarse: bool = False
    mixed: bool | None = None
    num_reqs: int | None = None
    num_tokens: int | None = None
    warmup_cause: str = ""


@lru_cache(maxsize=4096)
def told_by(name: str) -> Told:
    """Batch class and sizes from a step annotation; `unknown` where it carries no lengths to tell them by."""
    if found := _VLLM.match(name):
        return _vllm(found)
    if found := _SGLANG.match(name):
        batch_class, coarse = _SGLANG_CLASS.get(found[1].upper(), ("unknown", False))
        requests = int(found[2]) if found[2] else None
        tokens = int(found[3]) if found[3] else (requests if batch_class == "decode" and not coarse else None)
        return Told(batch_class, coarse, False if batch_class == "decode" else None, requests, tokens)
    if name.startswith("capture_"):
        return Told(warmup_cause="capture")
    if name.startswith("[param|") and "|warmup|" in name:
        return Told(warmup_cause="warmup")
    return Told()


def _vllm(found: re.Match[str]) -> Told:
    context, generation = int(found[2]), int(found[6])
    context_query = int(found[3] or found[5])
    context_length = int(found[4]) if found[4] is not None else None
    generated = int(found[7] or found[9])
    batch_class, coarse = "unknown", False
    if context + generation == 0:
        batch_class = "empty"
    elif context == 0:
        # Requests that have put out tokens: one token each, or several with speculative decoding, whose number the
        # name does not tell; far more come from preempted requests, which are prefilled again.
        coarse = generated != generation
        batch_class = "decode" if generated <= _MAX_SPECULATIVE * generation else "unknown"
    elif context_length is not None:
        # With context, a chunk of a prompt and the rest of a cached prompt look the same.
        coarse = context_length > context_query
        batch_class = "chunked_prefill" if coarse else "causal_prefill"
    return Told(
        batch_class,
        coarse and batch_class != "unknown",
        bool(context and generation),
        context + generation,
        int(found[1]) if found[1] else context_query + generated,
    )


def find_steps(ranges: Sequence[Range], wanted: RangeFilter, rank: int = 0) -> list[StepWindow]:
    """Step windows [start, end) in order of time. Of nested ones the outer counts; what an inner name tells is kept."""
    candidates = [r for r in ranges if wanted.matches(r.name)]
    candidates.sort(key=lambda r: (r.start_ns, -r.end_ns))
    steps: list[StepWindow] = []
    inner: list[list[Range]] = []
    open_steps: list[int] = []  # those that may still contain a later range
    for candidate in candidates:
        open_steps = [i for i in open_steps if steps[i].end_ns >= candidate.start_ns]
        around = next((i for i in open_steps if candidate.end_ns <= steps[i].end_ns), None)
        if around is not None:
            inner[around].append(candidate)
            continue
        open_steps.append(len(steps))
        steps.append(
            StepWindow(
                start_ns=candidate.start_ns,
                end_ns=candidate.end_ns,
                thread=candidate.thread,
                rank=rank,
                index=len(steps),
                name=candidate.name,
            )
        )
        inner.append([])
    for step, nested in zip(steps, inner, strict=True):
        _describe(step, nested)
    _find_phases(steps, ranges)
    return steps


def _describe(step: StepWindow, nested: Sequence[Range]) -> None:
    told = told_by(step.name or "")
    if told.batch_class == "unknown" and told.num_reqs is None:
        # A profiler's step around one engine step: the engine's own annotation knows more.
        inner: list[Told] = []
        behind = step.start_ns
        for candidate in nested:  # in order of time, outer before inner
            mine = told_by(candidate.name)
            if candidate.start_ns >= behind and (mine.batch_class != "unknown" or mine.num_reqs is not None):
                inner.append(mine)
                behind = candidate.end_ns
        if inner and all(t.batch_class == inner[0].batch_class for t in inner):
            told = inner[0] if len(inner) == 1 else Told(inner[0].batch_class, any(t.coarse for t in inner))
    step.batch_class, step.coarse, step.mixed = told.batch_class, told.coarse, told.mixed
    step.num_reqs, step.num_tokens = told.num_reqs, told.num_tokens
    causes = [told_by(name).warmup_cause for name in [step.name or "", *(r.name for r in nested)]]
    step.warmup_cause = "capture" if "capture" in causes else causes[0]
    step.warmup = bool(step.warmup_cause)


def _find_phases(steps: Sequence[StepWindow], ranges: Sequence[Range]) -> None:
    """Phases from an engine's own scopes on the step's thread; they do not overlap within a step."""
    scopes = sorted((r for r in ranges if r.name in _PHASES), key=lambda r: (r.start_ns, -r.end_ns))
    starts = [scope.start_ns for scope in scopes]
    for step in steps:
        for scope in scopes[bisect_left(starts, step.start_ns) : bisect_left(starts, step.end_ns)]:
            behind = step.phases[-1].end_ns if step.phases else step.start_ns
            if scope.end_ns > step.end_ns or scope.thread != step.thread or scope.start_ns < behind:
                continue
            step.phases.append(
                PhaseWindow(name=_PHASES[scope.name], start_ns=scope.start_ns, end_ns=scope.end_ns, thread=scope.thread)
            )


def overlap_lanes(steps: Sequence[StepWindow]) -> list[list[StepWindow]]:
    """Steps split so that none overlap within a lane; more than one only where an engine steps on several threads."""
    lanes: list[list[StepWindow]] = []
    for step in sorted(steps, key=lambda s: s.start_ns):
        for lane in lanes:
            if lane[-1].end_ns <= step.start_ns:
                lane.append(step)
                break
        else:
            lanes.append([step])
    return lanes
