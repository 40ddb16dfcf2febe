"""The sync profiler: counts host-device syncs, copies and kernel launches per step of a serving loop.

    with Profiler() as p:
        with p.step(batch_class="decode"):
            with p.phase("build"): ...
    print(p.report.steps[0].syncs.total)

Importing this package loads no torch; collectors load what they need when they start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .report import Report, report_schema
from .session import Profiler

if TYPE_CHECKING:
    from .simulated import simulated_device

__all__ = ["Profiler", "Report", "report_schema", "simulated_device"]


def __getattr__(name: str) -> Any:
    if name == "simulated_device":
        from .simulated import simulated_device

        return simulated_device
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
