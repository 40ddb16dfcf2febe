from typing import Any

from .lengths import BoolArray, Int32Array, UInt8Array

def read_rows(
    rows: list[str], scheduled: dict[str, int], ids: list[str] | None, computed: Any, out: Int32Array, /
) -> int: ...
def gather(rows: list[str], slots: dict[str, int], table: Int32Array, out: Int32Array, /) -> int: ...
def describe(
    query: Int32Array,
    computed: Int32Array,
    prefill: Int32Array | None,
    cached: Int32Array | None,
    flag_lens: Int32Array | None,
    flags: BoolArray | None,
    threshold: int,
    codes: UInt8Array,
    regions: UInt8Array,
    /,
) -> int: ...
def cut_three(query: Int32Array, computed: Int32Array, threshold: int, /) -> tuple[int, int, int, int]: ...
def cut_two(
    query: Int32Array,
    flags: BoolArray | None,
    threshold: int,
    uniform: bool,
    short_extends: bool,
    padding_cuts: bool,
    /,
) -> tuple[int, int]: ...
def unpack(starts: Int32Array, seq_lens: Int32Array, out: Int32Array, /) -> int: ...
def even_chunks(
    context: Int32Array, share: int, starts: Int32Array, ends: Int32Array, longest: Int32Array, /
) -> None: ...
def spread(ends: Int32Array, rows: int, width: int, out: Int32Array, /) -> None: ...
