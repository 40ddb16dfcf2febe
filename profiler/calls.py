"""One host call into a device runtime, as any collector or trace reader saw it.

Everything that is counted is counted from these: a collector or a reader only says *what was called*, and
`counting.py` alone decides what that means (what is a sync, which copy pairs with which wait).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Role(StrEnum):
    LAUNCH = "launch"  # one kernel launch call
    GRAPH_LAUNCH = "graph_launch"  # one graph launch call, however many kernels it runs
    COPY = "copy"
    MEMSET = "memset"
    SYNC = "sync"  # an explicit wait: stream, event or device
    POLL = "poll"  # a query; never a sync by itself
    DEVICE_WAIT = "device_wait"  # the device waits (cudaStreamWaitEvent); the host does not
    ALLOC = "alloc"  # device or host allocation, module load: may wait
    FREE = "free"  # may wait
    OTHER = "other"  # no launch, copy or wait (cudaFuncSetAttribute, cudaEventRecord...)


class Wait(StrEnum):
    STREAM = "stream"
    EVENT = "event"
    DEVICE = "device"


class Direction(StrEnum):
    H2D = "h2d"
    D2H = "d2h"
    D2D = "d2d"
    H2H = "h2h"


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A Python frame. `line` is 1-based; `source` is the stripped source line where it could be read."""

    file: str
    line: int
    function: str
    source: str = ""


class Call(msgspec.Struct, kw_only=True, gc=False):
    """One API call. Times are nanoseconds of the collector's own clock; None is unknown, never 0."""

    api: str  # the name as seen: "cudaMemcpyAsync", "hipMemcpyWithStream", "aten::_local_scalar_dense"
    role: Role
    ts_ns: int
    dur_ns: int | None = None  # time the host spent inside the call
    thread: int = 0  # one number a host thread; in a live process threading.get_native_id()
    wait: Wait | None = None  # role SYNC only
    direction: Direction | None = None  # role COPY only; None = not known
    nbytes: int | None = None
    pageable: bool | None = None  # role COPY: whether the host side is pageable memory
    maybe: bool | None = None  # whether it may have waited, where the collector knows better than the rule
    blocking: bool = False  # COPY, MEMSET: this call alone waits for the device (hipMemcpyWithStream, cudaMemcpy...)
    captured: bool = False  # recorded into a graph, did not run
    correlation: int | None = None  # joins the call with its device records
    phase: str | None = None  # set where the collector knows it; else found from the phase windows
    stack: tuple[Frame, ...] = ()  # innermost first, frames outside torch and syncfree first considered by sites.py
    allowed_upstream: bool = False  # inside a region that the engine's own checker allows (vLLM gpu_sync_allowed)
    device_idle_ns: int | None = None  # device time lost because the host waited here, where a trace can tell
    launch_lead_ns: int | None = None  # how far ahead the host was: at a launch's return, as a wait began
    repeat_value: bool = False  # a site read the same tensor again (hint: the classic per-layer sync of one value)
