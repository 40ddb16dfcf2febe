"""The driver entry points that the probe hooks, one table per vendor.

CUDA is hooked at driver level only: the runtime, Triton, cuBLASLt and CuPy all end in `libcuda`, so counting the
runtime too would count twice. HIP has one library, `libamdhip64`, whose exports may call each other; the hooks keep a
depth per thread and count the outermost call alone.

What an entry point *means* (role, kind of wait, direction by name, blocking) is `apis.lookup` of its name: there is one
vocabulary. This table adds what the hook must know to read a call: which argument holds the direction, the bytes, the
host pointer and the stream. Arguments are numbered from 0 in eightbytes of the System V calling convention (a `dim3`
passed by value takes two). Sources: the CUDA driver API and HIP runtime API references, for the versions named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from ..apis import lookup
from ..calls import Direction, Role, Wait

CONFIG_STREAM = 100  # the stream is the field at byte 32 of the launch configuration that argument 0 points to


class Reads(IntEnum):
    """Where the direction (and, for structs, the bytes) of a copy is read from."""

    NAME = 0  # the entry point's name tells
    KIND = 1  # a memcpy-kind argument: 0 host-host, 1 host-device, 2 device-host, 3 device-device, 4 by the pointers
    POINTERS = 2  # the driver is asked what memory `dst` and `src` are
    CUDA_2D = 3  # CUDA_MEMCPY2D
    CUDA_3D = 4  # CUDA_MEMCPY3D
    HIP_3D = 5  # hipMemcpy3DParms
    BATCH = 6  # arrays of destinations, sources and sizes; one call counts as one copy
    UNKNOWN = 7  # cannot be told: the copy counts, its direction is unknown


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """One function of the API and the exports that carry it.

    `suffixes`: the exported variants. `mangled`: the export's C++ name, in releases that declare it without extern "C".
    `since`: the first release that has it ("" = as old as the library itself).
    """

    name: str
    suffixes: tuple[str, ...] = ("",)
    reads: Reads = Reads.NAME
    kind: int = -1
    nbytes: tuple[int, ...] = ()  # the product of these arguments
    dst: int = -1
    src: int = -1
    stream: int = -1
    since: str = ""
    mangled: str = ""

    def exports(self) -> Iterator[tuple[str, str]]:
        """(exported symbol, name to report)."""
        for suffix in self.suffixes:
            yield self.name + suffix, self.name + suffix
        if self.mangled:
            yield self.mangled, self.name

    @property
    def role(self) -> Role:
        return lookup(self.name).role

    @property
    def capture(self) -> int:
        """1 where a stream capture begins here, -1 where it ends, else 0."""
        if "StreamBeginCapture" in self.name:
            return 1
        return -1 if "StreamEndCapture" in self.name else 0


@dataclass(frozen=True, slots=True)
class Vendor:
    """A runtime: the libraries that may carry it and what to hook in them."""

    name: str
    libraries: tuple[str, ...]  # file name prefixes
    table: tuple[EntryPoint, ...]
    is_capturing: tuple[str, ...]  # asks a stream whether it captures; the second for per-thread default streams
    pointer_attribute: str


def _many(names: str, **about: object) -> tuple[EntryPoint, ...]:
    return tuple(EntryPoint(name, **about) for name in names.split())  # type: ignore[arg-type]


_S = ("", "_ptsz")  # per-thread default stream
_D = ("", "_ptds")  # the same for calls without a stream argument
_2S = ("_v2", "_v2_ptsz")
_2D = ("_v2", "_v2_ptds")
_SPT = ("", "_spt")

CUDA = Vendor(
    name="cuda",
    libraries=("libcuda.so",),
    is_capturing=("cuStreamIsCapturing", "cuStreamIsCapturing_ptsz"),
    pointer_attribute="cuPointerGetAttribute",
    table=(
        # launches
        EntryPoint("cuLaunchKernel", _S, stream=8),
        EntryPoint("cuLaunchKernelEx", _S, stream=CONFIG_STREAM, since="11.8"),
        EntryPoint("cuLaunchCooperativeKernel", _S, stream=8, since="9.0"),
        EntryPoint("cuLaunchCooperativeKernelMultiDevice", since="9.0"),
        EntryPoint("cuGraphLaunch", _S, stream=1, since="10.0"),
        # capture
        EntryPoint("cuStreamBeginCapture", ("", "_ptsz", "_v2", "_v2_ptsz"), stream=0, since="10.0"),
        EntryPoint("cuStreamBeginCaptureToGraph", _S, stream=0, since="12.3"),
        EntryPoint("cuStreamEndCapture", _S, stream=0, since="10.0"),
        # copies
        EntryPoint("cuMemcpyHtoD", _2D, nbytes=(2,), dst=0, src=1),
        EntryPoint("cuMemcpyDtoH", _2D, nbytes=(2,), dst=0, src=1),
        EntryPoint("cuMemcpyDtoD", _2D, nbytes=(2,), dst=0, src=1),
        EntryPoint("cuMemcpyHtoDAsync", _2S, nbytes=(2,), dst=0, src=1, stream=3),
        EntryPoint("cuMemcpyDtoHAsync", _2S, nbytes=(2,), dst=0, src=1, stream=3),
        EntryPoint("cuMemcpyDtoDAsync", _2S, nbytes=(2,), dst=0, src=1, stream=3),
        EntryPoint("cuMemcpyDtoA", _2D, nbytes=(3,)),
        EntryPoint("cuMemcpyAtoD", _2D, nbytes=(3,)),
        EntryPoint("cuMemcpyHtoA", _2D, nbytes=(3,), src=2),
        EntryPoint("cuMemcpyAtoH", _2D, nbytes=(3,), dst=0),
        EntryPoint("cuMemcpyAtoA", _2D, nbytes=(4,)),
        EntryPoint("cuMemcpyHtoAAsync", _2S, nbytes=(3,), src=2, stream=4),
        EntryPoint("cuMemcpyAtoHAsync", _2S, nbytes=(3,), dst=0, stream=4),
        EntryPoint("cuMemcpy", _D, reads=Reads.POINTERS, nbytes=(2,), dst=0, src=1, since="4.0"),
        EntryPoint("cuMemcpyAsync", _S, reads=Reads.POINTERS, nbytes=(2,), dst=0, src=1, stream=3, since="4.0"),
        EntryPoint("cuMemcpyPeer", _D, nbytes=(4,), since="4.0"),
        EntryPoint("cuMemcpyPeerAsync", _S, nbytes=(4,), stream=5, since="4.0"),
        EntryPoint("cuMemcpy2D", _2D, reads=Reads.CUDA_2D),
        EntryPoint("cuMemcpy2DUnaligned", _2D, reads=Reads.CUDA_2D),
        EntryPoint("cuMemcpy2DAsync", _2S, reads=Reads.CUDA_2D, stream=1),
        EntryPoint("cuMemcpy3D", _2D, reads=Reads.CUDA_3D),
        EntryPoint("cuMemcpy3DAsync", _2S, reads=Reads.CUDA_3D, stream=1),
        EntryPoint("cuMemcpy3DPeer", _D, since="4.0"),
        EntryPoint("cuMemcpy3DPeerAsync", _S, stream=1, since="4.0"),
        EntryPoint("cuMemcpyBatchAsync", _S, reads=Reads.BATCH, stream=8, since="12.8"),
        EntryPoint("cuMemcpyBatchAsync", _2S, reads=Reads.BATCH, stream=7, since="13.0"),
        EntryPoint("cuMemcpy3DBatchAsync", _S, reads=Reads.UNKNOWN, stream=4, since="12.8"),
        EntryPoint("cuMemcpy3DBatchAsync", _2S, reads=Reads.UNKNOWN, stream=3, since="13.0"),
        # memsets
        *_many("cuMemsetD8 cuMemsetD16 cuMemsetD32 cuMemsetD2D8 cuMemsetD2D16 cuMemsetD2D32", suffixes=_2D),
        *_many("cuMemsetD8Async cuMemsetD16Async cuMemsetD32Async", suffixes=_S, stream=3, since="3.2"),
        *_many("cuMemsetD2D8Async cuMemsetD2D16Async cuMemsetD2D32Async", suffixes=_S, stream=5, since="3.2"),
        # waits
        EntryPoint("cuStreamSynchronize", _S, stream=0),
        EntryPoint("cuEventSynchronize"),
        EntryPoint("cuCtxSynchronize", ("", "_v2"), since="_v2: 13.0"),
        # queries
        EntryPoint("cuStreamQuery", _S, stream=0),
        EntryPoint("cuEventQuery"),
        # may wait
        *_many("cuMemAlloc cuMemAllocPitch cuMemAllocHost cuMemHostRegister cuMemFree", suffixes=("_v2",)),
        *_many("cuMemHostAlloc cuMemFreeHost cuMemHostUnregister"),
        *_many("cuMemAllocManaged cuMemCreate cuMemMap cuMemUnmap cuMemRelease", since="10.2"),
        *_many("cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary cuModuleUnload"),
        EntryPoint("cuLibraryLoadData", since="12.0"),
    ),
)

HIP = Vendor(
    name="hip",
    libraries=("libamdhip64.so",),
    is_capturing=("hipStreamIsCapturing", "hipStreamIsCapturing_spt"),
    pointer_attribute="hipPointerGetAttribute",
    table=(
        # launches
        EntryPoint("hipLaunchKernel", _SPT, stream=7),
        EntryPoint("hipLaunchKernelExC", _SPT, stream=CONFIG_STREAM, since="6.4"),
        EntryPoint("hipDrvLaunchKernelEx", stream=CONFIG_STREAM, since="6.4"),
        EntryPoint("hipExtLaunchKernel", stream=7),
        EntryPoint("hipLaunchCooperativeKernel", _SPT, stream=7),
        EntryPoint("hipModuleLaunchKernel", stream=8),
        EntryPoint(
            "hipExtModuleLaunchKernel",
            stream=8,
            mangled="_Z24hipExtModuleLaunchKernelP18ihipModuleSymbol_tjjjjjjmP12ihipStream_tPPvS4_P11ihipEvent_tS6_j",
        ),
        EntryPoint(
            "hipHccModuleLaunchKernel",
            stream=8,
            mangled="_Z24hipHccModuleLaunchKernelP18ihipModuleSymbol_tjjjjjjmP12ihipStream_tPPvS4_P11ihipEvent_tS6_",
        ),
        EntryPoint("hipModuleLaunchCooperativeKernel", stream=8, since="5.5"),
        *_many(
            "hipLaunchCooperativeKernelMultiDevice hipExtLaunchMultiKernelMultiDevice "
            "hipModuleLaunchCooperativeKernelMultiDevice"
        ),
        EntryPoint("hipGraphLaunch", _SPT, stream=1, since="4.3"),
        # capture
        EntryPoint("hipStreamBeginCapture", _SPT, stream=0, since="4.3"),
        EntryPoint("hipStreamBeginCaptureToGraph", stream=0, since="6.2"),
        EntryPoint("hipStreamEndCapture", _SPT, stream=0, since="4.3"),
        # copies
        EntryPoint("hipMemcpy", _SPT, reads=Reads.KIND, kind=3, nbytes=(2,), dst=0, src=1),
        EntryPoint("hipMemcpyWithStream", reads=Reads.KIND, kind=3, nbytes=(2,), dst=0, src=1, stream=4),
        EntryPoint("hipMemcpyAsync", _SPT, reads=Reads.KIND, kind=3, nbytes=(2,), dst=0, src=1, stream=4),
        *_many("hipMemcpyHtoD hipMemcpyDtoH hipMemcpyDtoD", nbytes=(2,), dst=0, src=1),
        *_many("hipMemcpyHtoDAsync hipMemcpyDtoHAsync hipMemcpyDtoDAsync", nbytes=(2,), dst=0, src=1, stream=3),
        EntryPoint("hipMemcpyHtoA", nbytes=(3,), src=2),
        EntryPoint("hipMemcpyAtoH", nbytes=(3,), dst=0),
        *_many("hipMemcpyDtoA hipMemcpyAtoD", nbytes=(3,), since="6.2"),
        EntryPoint("hipMemcpyAtoA", nbytes=(4,), since="6.2"),
        EntryPoint("hipMemcpyHtoAAsync", nbytes=(3,), src=2, stream=4, since="6.2"),
        EntryPoint("hipMemcpyAtoHAsync", nbytes=(3,), dst=0, stream=4, since="6.2"),
        EntryPoint("hipMemcpyPeer", nbytes=(4,)),
        EntryPoint("hipMemcpyPeerAsync", nbytes=(4,), stream=5),
        EntryPoint("hipMemcpy2D", _SPT, reads=Reads.KIND, kind=6, nbytes=(4, 5), dst=0, src=2),
        EntryPoint("hipMemcpy2DAsync", _SPT, reads=Reads.KIND, kind=6, nbytes=(4, 5), dst=0, src=2, stream=7),
        EntryPoint("hipMemcpy2DToArray", _SPT, reads=Reads.KIND, kind=7, nbytes=(5, 6), src=3),
        EntryPoint("hipMemcpy2DToArrayAsync", _SPT, reads=Reads.KIND, kind=7, nbytes=(5, 6), src=3, stream=8),
        EntryPoint("hipMemcpy2DFromArray", _SPT, reads=Reads.KIND, kind=7, nbytes=(5, 6), dst=0),
        EntryPoint("hipMemcpy2DFromArrayAsync", _SPT, reads=Reads.KIND, kind=7, nbytes=(5, 6), dst=0, stream=8),
        EntryPoint("hipMemcpyToArray", reads=Reads.KIND, kind=5, nbytes=(4,), src=3),
        EntryPoint("hipMemcpyFromArray", _SPT, reads=Reads.KIND, kind=5, nbytes=(4,), dst=0),
        EntryPoint("hipMemcpyToSymbol", _SPT, reads=Reads.KIND, kind=4, nbytes=(2,), src=1),
        EntryPoint("hipMemcpyToSymbolAsync", _SPT, reads=Reads.KIND, kind=4, nbytes=(2,), src=1, stream=5),
        EntryPoint("hipMemcpyFromSymbol", _SPT, reads=Reads.KIND, kind=4, nbytes=(2,), dst=0),
        EntryPoint("hipMemcpyFromSymbolAsync", _SPT, reads=Reads.KIND, kind=4, nbytes=(2,), dst=0, stream=5),
        EntryPoint("hipMemcpy3D", _SPT, reads=Reads.HIP_3D),
        EntryPoint("hipMemcpy3DAsync", _SPT, reads=Reads.HIP_3D, stream=1),
        # hip_Memcpy2D and HIP_MEMCPY3D name memory types whose numbers changed with HIP 6: direction unknown
        *_many("hipMemcpyParam2D hipDrvMemcpy2DUnaligned hipDrvMemcpy3D", reads=Reads.UNKNOWN),
        *_many("hipMemcpyParam2DAsync hipDrvMemcpy3DAsync", reads=Reads.UNKNOWN, stream=1),
        # memsets
        *_many("hipMemset hipMemset2D hipMemset3D", suffixes=_SPT),
        *_many("hipMemsetD8 hipMemsetD16 hipMemsetD32"),
        EntryPoint("hipMemsetAsync", _SPT, stream=3),
        *_many("hipMemsetD8Async hipMemsetD16Async hipMemsetD32Async", stream=3),
        EntryPoint("hipMemset2DAsync", _SPT, stream=5),
        EntryPoint("hipMemset3DAsync", _SPT, stream=1),  # its two structs travel on the stack
        # waits
        EntryPoint("hipDeviceSynchronize"),
        EntryPoint("hipStreamSynchronize", _SPT, stream=0),
        EntryPoint("hipEventSynchronize"),
        EntryPoint("hipCtxSynchronize"),
        # queries
        EntryPoint("hipStreamQuery", _SPT, stream=0),
        EntryPoint("hipEventQuery"),
        # may wait
        *_many(
            "hipMalloc hipExtMallocWithFlags hipMallocPitch hipMalloc3D hipMallocArray hipMallocManaged hipHostMalloc "
            "hipHostAlloc hipMallocHost hipMemAllocHost hipHostRegister hipMemCreate hipMemMap hipModuleLoad "
            "hipModuleLoadData hipModuleLoadDataEx hipFree hipFreeHost hipHostFree hipFreeArray hipHostUnregister "
            "hipMemUnmap hipMemRelease hipModuleUnload"
        ),
    ),
)

VENDORS: dict[str, Vendor] = {vendor.name: vendor for vendor in (CUDA, HIP)}


_ROLES = {role: i for i, role in enumerate("launch graph_launch copy memset sync poll alloc free".split())}
_WAITS = {None: 0, Wait.STREAM: 1, Wait.EVENT: 2, Wait.DEVICE: 3}
_DIRECTIONS = {None: 0, Direction.H2D: 1, Direction.D2H: 2, Direction.D2D: 3, Direction.H2H: 4}
_OTHER = 8


def encoded(vendor: Vendor) -> list[tuple[str, list[int], bool, str]]:
    """(export, bytes of layout.c's `Entry`, whether it is a launch, name) for every export of the table."""
    wanted = []
    for point in vendor.table:
        api = lookup(point.name)
        for export, name in point.exports():
            first, second = (*point.nbytes, -1, -1)[:2]
            signed = (point.capture, point.kind, first, second, point.dst, point.src, point.stream)
            row = [
                _ROLES.get(api.role.value, _OTHER),
                _WAITS[api.wait],
                int(point.reads),
                _DIRECTIONS[api.direction],
                int(api.blocking),
                int(vendor is HIP),
                int(export.endswith(("_ptsz", "_ptds", "_spt"))),
                *(value & 0xFF for value in signed),
            ]
            wanted.append((export, row, api.role in (Role.LAUNCH, Role.GRAPH_LAUNCH), name))
    return wanted


def vendor_of(file_name: str) -> Vendor | None:
    """The vendor whose runtime a library of this base name carries."""
    for vendor in VENDORS.values():
        if file_name.startswith(vendor.libraries):
            return vendor
    return None
