"""The sync profiler: counts host-device syncs, copies and kernel launches per step of a serving loop.

    with Profiler() as p:
        with p.step(batch_class="decode"):
            with p.phase("build"): ...
    print(p.report.steps[0].syncs.total)

Importing this package loads nothing: the pytest plugin lies in it and is loaded by everybody's pytest. Names load what
they need when they are used, torch only where a collector starts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .assertions import assert_sync_free
    from .report import Report, report_schema
    from .session import Profiler
    from .simulated import simulated_device

__all__ = ["Profiler", "Report", "assert_sync_free", "report_schema", "simulated_device"]

_HOME = {
    "Profiler": "session",
    "Report": "report",
    "assert_sync_free": "assertions",
    "report_schema": "report",
    "simulated_device": "simulated",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
