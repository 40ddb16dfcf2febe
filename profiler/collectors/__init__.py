"""Collectors by name, and the choice of the best that works here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ...errors import BadInput, Unreachable
from ..report import Note
from .base import GROUPS, Collector, Counters

__all__ = ["GROUPS", "NAMES", "Collector", "Counters", "choose", "make"]


def _simulated() -> Collector:
    from .simulated import SimulatedCollector

    return SimulatedCollector()


def _kineto() -> Collector:
    from .kineto import KinetoCollector

    return KinetoCollector()


def _kineto_stacks() -> Collector:
    from .kineto import KinetoCollector

    return KinetoCollector(with_stack=True)


# Set where hooks were brought into this process from outside: the probe then counts through them.
brought: Callable[[], Collector] | None = None


def _probe() -> Collector:
    if brought is not None:
        return brought()
    from .probe import ProbeCollector

    return ProbeCollector()


def _gpu_trace() -> Collector:
    from .gpu_trace import GpuTraceCollector

    return GpuTraceCollector()


def _transfers() -> Collector:
    from .transfers import TransfersCollector

    return TransfersCollector()


NAMES: dict[str, Callable[[], Collector]] = {
    "probe": _probe,
    "kineto": _kineto,
    "kineto_stacks": _kineto_stacks,
    "simulated": _simulated,
    "gpu_trace": _gpu_trace,
    "transfers": _transfers,
}


def make(name: str) -> Collector:
    """A new collector by name. Raises `BadInput` for an unknown one."""
    if name not in NAMES:
        raise BadInput(f"collectors: expected one of auto, {', '.join(NAMES)}; got {name!r}")
    return NAMES[name]()


def choose(wanted: str | Sequence[str | Collector]) -> tuple[list[Collector], list[Note]]:
    """The collectors to use, and notes on what was not available.

    "auto": the simulated device's own inside `simulated_device()`; on a GPU the probe, or kineto where attaching is
    denied; none on a machine whose torch has no device (every device figure is then null).
    """
    if isinstance(wanted, str):
        if wanted != "auto":
            return [make(name.strip()) for name in wanted.split(",")], []
        return _auto()
    return [make(item) if isinstance(item, str) else item for item in wanted], []


def _auto() -> tuple[list[Collector], list[Note]]:
    simulated = sys.modules.get("syncfree.profiler.simulated")
    if simulated is not None and simulated.is_active():
        return [make("simulated")], []
    torch = sys.modules.get("torch")
    if torch is None:
        return [], [Note(kind="device", text="torch is not loaded here: device figures are unknown")]
    if brought is not None:
        return [make("probe")], []
    if not torch.cuda.is_available():
        text = "this device is the CPU: there are no device syncs, copies or launches to count, so they are null"
        return [], [Note(kind="device", text=text)]
    try:
        from .probe import ProbeCollector

        reason = ProbeCollector.available()
    except (ImportError, Unreachable) as error:
        reason = str(error)
    if reason is None:
        return [make("probe")], []
    return [make("kineto")], [Note(kind="collector", text=f"probe not used, kineto instead: {reason}")]
