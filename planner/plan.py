"""The plan: which metadata a batch needs, with values, sources and consumers, and why everything else is left out."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .environment import ITEMSIZE
from .errors import BadInput, SkippedField
from .vocabulary import BatchClass, RowKind, Shape, Source

SCHEMA = "syncfree.plan/1"
_HEADER = SCHEMA.encode() + b"\n"
_ARRAY_CODE = 1


class FieldPlan(msgspec.Struct, frozen=True, eq=False):
    """One planned field. `value`: int, bool or list (stays on the host), int32 array (copied once), or `None`.

    `shape` is empty for a scalar; an extent of `None` is known to the engine only.
    """

    source: Source
    dtype: str
    shape: Shape
    value: Any
    consumer: str

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FieldPlan):
            return NotImplemented
        return (self.source, self.dtype, self.shape, self.consumer) == (
            other.source,
            other.dtype,
            other.shape,
            other.consumer,
        ) and _same(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]

    @property
    def nbytes(self) -> int:
        """Bytes on the device, as far as the shape is known; 0 for what stays on the host."""
        if isinstance(self.value, np.ndarray):
            return int(self.value.nbytes)
        if self.source == "host" or any(extent is None for extent in self.shape):
            return 0
        return math.prod(extent for extent in self.shape if extent is not None) * ITEMSIZE[self.dtype]


def _same(a: Any, b: Any) -> bool:
    """Lists may be ragged, which NumPy does not compare."""
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else type(a) is type(b) and bool(a == b)


class SegmentPlan(msgspec.Struct, frozen=True):
    """One segment: rows and tokens as (start, stop), longest query and sequence in tokens."""

    name: str
    rows: tuple[int, int]
    tokens: tuple[int, int]
    max_query_len: int
    max_seq_len: int


class Cost(msgspec.Struct, frozen=True):
    """What building this metadata costs. `h2d_bytes` go in one copy; `launches` are device launches of the build."""

    syncs: int
    h2d_copies: int
    h2d_bytes: int
    launches: int
    persistent_bytes: int


class Heads(msgspec.Struct, frozen=True):
    """Query heads as the kernels are launched, after padding; `None` where no such kernel runs."""

    decode: int | None = None
    fp8_prefill: int | None = None


class MetadataPlan(msgspec.Struct, frozen=True):
    """The minimal metadata of one batch for one backend. Immutable; `plan[name]` gives a field or says why not.

    `order` is what `classify` found (row `order[i]` comes `i`-th). Where `reordered` is true the plan's rows, segments
    and fields are already in that order and the engine has to follow; else they are in the order given.
    """

    backend: str
    batch_class: BatchClass
    mixed: bool
    coarse: bool
    graph_eligible: bool
    reordered: bool
    num_tokens: int
    routes: dict[str, str]
    heads: Heads
    rows: list[RowKind]
    order: list[int] | None
    segments: list[SegmentPlan]
    fields: dict[str, FieldPlan]
    skipped: dict[str, str]
    cost: Cost

    def __getitem__(self, name: str) -> FieldPlan:
        """A planned field. Raises `SkippedField` with the reason for one that was left out."""
        found = self.fields.get(name)
        if found is not None:
            return found
        reason = self.skipped.get(name)
        if reason is None:
            raise KeyError(f"{name}: no field of {self.backend}")
        raise SkippedField(f"{name}: left out: {reason}")

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def segment(self, name: str) -> SegmentPlan | None:
        """The segment of that name, `None` if it has no rows."""
        return next((segment for segment in self.segments if segment.name == name), None)

    def host_arrays(self) -> dict[str, npt.NDArray[np.int32]]:
        """The arrays that have to reach the device, in the plan's order: pack them and copy once."""
        return {name: f.value for name, f in self.fields.items() if isinstance(f.value, np.ndarray)}

    def to_bytes(self) -> bytes:
        """Versioned bytes for other processes (tensor-parallel ranks): `from_bytes` gives an equal plan."""
        return _HEADER + _ENCODER.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> MetadataPlan:
        """Read what `to_bytes` wrote. Raises `BadInput` for another version, truncated or foreign bytes."""
        if not data.startswith(_HEADER):
            found = bytes(data[:32]).split(b"\n")[0]
            raise BadInput(f"plan bytes: expected version {SCHEMA}, got {found!r}")
        try:
            return _DECODER.decode(memoryview(data)[len(_HEADER) :])
        except (msgspec.DecodeError, ValueError, struct.error) as error:
            raise BadInput(f"plan bytes: expected a whole {SCHEMA}, got {len(data)} bytes: {error}") from error


def _encode_array(value: object) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} in a plan")
    array = np.ascontiguousarray(value, dtype="<i4")
    head = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
    return msgspec.msgpack.Ext(_ARRAY_CODE, head + array.tobytes())


def _decode_array(code: int, data: memoryview) -> npt.NDArray[np.int32]:
    if code != _ARRAY_CODE:
        raise BadInput(f"plan bytes: expected an array (code {_ARRAY_CODE}), got code {code}")
    (dims,) = struct.unpack_from("<B", data)
    shape = struct.unpack_from(f"<{dims}I", data, 1)
    array = np.frombuffer(bytes(data[1 + 4 * dims :]), dtype="<i4")
    if array.size != math.prod(shape):
        raise BadInput(f"plan bytes: expected {math.prod(shape)} elements for shape {list(shape)}, got {array.size}")
    return array.reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_DECODER = msgspec.msgpack.Decoder(MetadataPlan, ext_hook=_decode_array)
