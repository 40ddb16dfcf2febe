"""Text of a trace file in blocks: plain or gzip, unpacked on the fly, never beyond stated bounds."""

from __future__ import annotations

import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from ...errors import BadInput

GZIP = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"  # a mark that some editors and shells put in front of UTF-8
SQLITE = b"SQLite format 3\0"
MIB = 1 << 20
_READ = 256 << 10
_BLOCK = 512 << 10
_FREE_RATIO = 64 * MIB  # below this much text the packing ratio does not matter


class NoTrace(BadInput):
    """A file that is well-formed but none of the traces that can be read."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of reading one file; beyond any of them reading stops with `BadInput`. Sizes are bytes.

    Peak memory is about 30 MB + 4 * `item` (only if an event is that long) + `kept`; for a format that has to be
    decoded whole about 3 times its text.
    """

    unpacked: int = 8192 * MIB  # text of one file
    ratio: int = 200  # text : packed bytes, once there are 64 MiB of text; real traces stay below 60
    item: int = 32 * MIB  # one event, or what stands before the first
    whole: int = 512 * MIB  # text of a format that cannot be read in pieces (rocprofv3 JSON)
    kept: int = 512 * MIB  # what is kept of a process: some 36 bytes a kernel or frame, 320 a launch, copy or wait


DEFAULT_LIMITS = Limits()


class Text:
    """Iterates over the unpacked text of a file, without a byte order mark, in blocks of at most 512 KiB.

    `truncated` is set when a gzip stream ended early, `damaged` holds zlib's words when it could not be unpacked on.
    Raises `BadInput` where the file cannot be opened or goes beyond a limit.
    """

    def __init__(self, path: Path, limits: Limits = DEFAULT_LIMITS) -> None:
        self.path = path
        self.limits = limits
        self.truncated = False
        self.damaged = ""
        self.size = 0  # bytes of text so far
        self._packed = 0
        self._blocks = self._read()

    def __iter__(self) -> Iterator[bytes]:
        return self._blocks

    def whole(self, limit: int) -> bytearray:
        """All of the text; `BadInput` beyond `limit` bytes."""
        text = bytearray()
        for block in self._blocks:
            text += block
            if self.size > limit:
                raise BadInput(f"{self.path}: expected at most {limit >> 20} MiB of text in this format, got more")
        return text

    def _read(self) -> Iterator[bytes]:
        with open_regular(self.path) as file:
            first = file.read(_READ)
            blocks = self._unpack(file, first) if first.startswith(GZIP) else self._plain(file, first)
            for block in blocks:
                block = block if self.size else block.removeprefix(BOM)
                self.size += len(block)
                self._check()
                yield block

    def _plain(self, file: BinaryIO, first: bytes) -> Iterator[bytes]:
        block = first
        while block:
            self._packed += len(block)
            yield block
            block = file.read(_BLOCK)

    def _unpack(self, file: BinaryIO, first: bytes) -> Iterator[bytes]:
        data = first
        engine, fresh = zlib.decompressobj(31), True
        while data:
            self._packed += len(data)
            while True:
                if fresh:  # gzip files may be several streams, one behind the other, and padded with zeros
                    data = data.lstrip(b"\0")
                    if not data:
                        break
                    if not data.startswith(GZIP[: len(data)]):
                        return  # trailing garbage, which gzip(1) ignores too
                try:
                    out = engine.decompress(data, _BLOCK)
                except zlib.error as error:
                    self.damaged = str(error)
                    return
                fresh = False
                if out:
                    yield out
                if engine.eof:
                    data = engine.unused_data
                    engine, fresh = zlib.decompressobj(31), True
                    continue
                data = engine.unconsumed_tail
                if not data and len(out) < _BLOCK:
                    break
            data = file.read(_READ)
        self.truncated = not fresh

    def _check(self) -> None:
        limits = self.limits
        if self.size > limits.unpacked:
            raise BadInput(f"{self.path}: expected at most {limits.unpacked >> 20} MiB of text, got more")
        if self.size > _FREE_RATIO and self.size > limits.ratio * self._packed:
            raise BadInput(
                f"{self.path}: unpacks to more than {limits.ratio} times its size "
                f"({self.size >> 20} MiB from {self._packed >> 10} KiB): not read further"
            )


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe or device, which may never end, is refused."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadInput(f"{path}: expected a file, got something else")
        return path.open("rb")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from error


def head_of(path: Path, limits: Limits = DEFAULT_LIMITS, size: int = 64 << 10) -> bytes:
    """The first bytes of a file's text, to tell its format by. Raises `BadInput` where there are none."""
    text = Text(path, limits)
    parts: list[bytes] = []
    for block in text:
        parts.append(block)
        if text.size >= size:
            break
    head = b"".join(parts)[:size]
    if not head.strip():
        why = f"gzip data that cannot be unpacked ({text.damaged})" if text.damaged else "an empty file"
        raise BadInput(f"{path}: expected a trace, got {'a gzip file that ends at once' if text.truncated else why}")
    return head
