"""Which runtime entry point means what, by name: CUDA runtime, CUDA driver and HIP in one table.

Sources: CUDA runtime and driver API reference ("API synchronization behavior"), HIP API reference, and what
torch.profiler, rocprofv3 and Nsight Systems print as names. Suffixes that only tell versions or the per-thread
default stream apart (`_v2`, `_v7000`, `_ptsz`, `_ptds`, `_spt`) are ignored.
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from .calls import Direction, Role, Wait

_SUFFIX = re.compile(r"(?:_v\d+|_ptsz|_ptds|_spt)+$")


class Api(msgspec.Struct, frozen=True, gc=False):
    role: Role
    wait: Wait | None = None
    direction: Direction | None = None  # where the name alone tells it
    blocking: bool = False


_LAUNCH = Api(Role.LAUNCH)
_GRAPH = Api(Role.GRAPH_LAUNCH)
_OTHER = Api(Role.OTHER)
_ALLOC = Api(Role.ALLOC)
_FREE = Api(Role.FREE)
_POLL = Api(Role.POLL)

_TABLE: dict[str, Api] = {
    **dict.fromkeys(
        (
            "cudaLaunchKernel cudaLaunchKernelExC cudaLaunchCooperativeKernel cudaLaunchCooperativeKernelMultiDevice "
            "cuLaunchKernel cuLaunchKernelEx cuLaunchCooperativeKernel cuLaunchCooperativeKernelMultiDevice "
            "hipLaunchKernel hipLaunchKernelExC hipExtLaunchKernel hipModuleLaunchKernel hipExtModuleLaunchKernel "
            "hipHccModuleLaunchKernel hipDrvLaunchKernelEx "
            "hipLaunchCooperativeKernel hipModuleLaunchCooperativeKernel hipLaunchCooperativeKernelMultiDevice "
            "hipExtLaunchMultiKernelMultiDevice hipModuleLaunchCooperativeKernelMultiDevice"
        ).split(),
        _LAUNCH,
    ),
    **dict.fromkeys("cudaGraphLaunch cuGraphLaunch hipGraphLaunch".split(), _GRAPH),
    **dict.fromkeys(
        "cudaEventQuery cudaStreamQuery cuEventQuery cuStreamQuery hipEventQuery hipStreamQuery".split(), _POLL
    ),
    **dict.fromkeys("cudaStreamWaitEvent cuStreamWaitEvent hipStreamWaitEvent".split(), Api(Role.DEVICE_WAIT)),
    **dict.fromkeys(
        (
            "cudaMalloc cudaMallocPitch cudaMalloc3D cudaMallocArray cudaMallocManaged cudaHostAlloc cudaMallocHost "
            "cudaHostRegister cuMemAlloc cuMemAllocPitch cuMemAllocHost cuMemHostAlloc cuMemAllocManaged "
            "cuMemHostRegister cuMemCreate cuMemMap cuModuleLoad cuModuleLoadData cuModuleLoadDataEx "
            "cuModuleLoadFatBinary cuLibraryLoadData hipMalloc hipExtMallocWithFlags hipMallocPitch hipMalloc3D "
            "hipMallocArray hipMallocManaged hipHostMalloc hipHostAlloc hipMallocHost hipMemAllocHost hipHostRegister "
            "hipMemCreate hipMemMap hipModuleLoad hipModuleLoadData hipModuleLoadDataEx"
        ).split(),
        _ALLOC,
    ),
    **dict.fromkeys(
        (
            "cudaFree cudaFreeHost cudaFreeArray cudaHostUnregister cuMemFree cuMemFreeHost cuMemHostUnregister "
            "cuMemUnmap cuMemRelease cuModuleUnload hipFree hipFreeHost hipHostFree hipFreeArray hipHostUnregister "
            "hipMemUnmap hipMemRelease hipModuleUnload"
        ).split(),
        _FREE,
    ),
}

# Loading a module inside a step means that a kernel was compiled, or loaded lazily, for it.
MODULE_LOADS = frozenset(
    "cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary cuLibraryLoadData "
    "hipModuleLoad hipModuleLoadData hipModuleLoadDataEx".split()
)

_SYNC = re.compile(r"^(?:cuda|cu|hip)(Device|Thread|Ctx|Context|Stream|Event)Synchronize$")
_WAIT_OF = {"Stream": Wait.STREAM, "Event": Wait.EVENT}
_COPY = re.compile(
    r"^(?:cuda|cu|hip|hipDrv)Memcpy(?:Param)?(?:2D|3D)?(?P<peer>Peer)?(?:ToArray|FromArray|ArrayToArray)?"
    r"(?:ToSymbol|FromSymbol)?(?P<dir>[HDA]to[HDA])?(?:Batch)?(?:Unaligned)?(?:WithStream)?(?P<a>Async)?$"
)
_MEMSET = re.compile(r"^(?:cuda|cu|hip)Memset(?:2D|3D|)(?:D2D8|D2D16|D2D32|D8|D16|D32|)(?P<a>Async|)$")
_DIRECTION = {
    "HtoD": Direction.H2D,
    "HtoA": Direction.H2D,
    "DtoH": Direction.D2H,
    "AtoH": Direction.D2H,
    "DtoD": Direction.D2D,
    "AtoD": Direction.D2D,
    "DtoA": Direction.D2D,
    "AtoA": Direction.D2D,
}


def base_name(api: str) -> str:
    """The entry point's name without version and per-thread-stream suffixes."""
    return _SUFFIX.sub("", api)


@lru_cache(maxsize=4096)
def lookup(api: str) -> Api:
    """What a runtime entry point does, by its name; names not in the table are `Role.OTHER`."""
    name = base_name(api)
    found = _TABLE.get(name)
    if found is not None:
        return found
    if match := _SYNC.match(name):
        return Api(Role.SYNC, wait=_WAIT_OF.get(match[1], Wait.DEVICE))
    if match := _COPY.match(name):
        direction = _DIRECTION.get(match["dir"] or "")
        if match["peer"]:
            direction = Direction.D2D
        return Api(Role.COPY, direction=direction, blocking=not match["a"])
    if match := _MEMSET.match(name):
        return Api(Role.MEMSET, blocking=not match["a"])
    return _OTHER
