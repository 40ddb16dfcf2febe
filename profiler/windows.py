"""Windows of time that figures are grouped by: a step, and the phases inside it."""

from __future__ import annotations

import msgspec

from .collectors.base import Counters

PHASES = ("build", "forward", "sample", "output", "other")
VERDICT_PHASES = ("build", "forward")  # what a verdict is about; a step without these phases is judged whole


class PhaseWindow(msgspec.Struct, kw_only=True):
    name: str
    start_ns: int
    end_ns: int
    thread: int = 0
    marks: dict[str, tuple[Counters, Counters]] = msgspec.field(default_factory=dict)  # by collector name


class StepWindow(msgspec.Struct, kw_only=True):
    start_ns: int
    end_ns: int
    thread: int = 0
    rank: int = 0
    index: int = 0
    batch_class: str = "unknown"
    coarse: bool = False
    mixed: bool | None = None
    num_reqs: int | None = None
    num_tokens: int | None = None
    name: str | None = None
    warmup: bool = False
    warmup_cause: str = ""  # warmup, compile or capture; "" where `warmup` is false
    phases: list[PhaseWindow] = msgspec.field(default_factory=list)
    marks: dict[str, tuple[Counters, Counters]] = msgspec.field(default_factory=dict)
