"""Whether torch compiled something meanwhile: a step that did is one of preparation, not of service."""

from __future__ import annotations

import sys


def compilations() -> int:
    """Frames that Dynamo has compiled or tried to in this process so far; 0 where Dynamo was never loaded.

    Dynamo keeps the count itself (`torch._dynamo.utils.counters`); a kernel that Triton compiles alone shows as a
    module load in what the collectors see.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = getattr(dynamo, "counters", None)
    return int(counters["frames"]["total"]) if counters is not None else 0
