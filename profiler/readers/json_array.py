"""One long JSON array read in pieces: complete elements at a time, decoded by type, nothing else kept.

A piece ends at a boundary `},{` that is proven by decoding: `[` + piece + `]` is JSON only if the boundary lies
between two elements of the outer array (inside a nested list or a string something would stay open). Memory is a few
times the piece, not the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

from ...errors import BadInput
from .text import Text

T = TypeVar("T")

_BOUNDARY = re.compile(rb"\}\s*,\s*\{")
_BYTE = re.compile(r"\(byte (\d+)\)")
# What no JSON number is, yet C and C++ programs print: NaN, Infinity, -inf, nan(ind).
_NOT_A_NUMBER = re.compile(rb"(?<=[:\[,\s])[-+]?(?:NaN|nan|Infinity|infinity|inf|INF)(?:\(\w*\))?(?=\s*[,\]}])")
_BAD_ESCAPE = re.compile(rb'\\(?:\\|(?!["/bfnrtu]))')
# Half of a character beyond 16 bits, by itself: a name was cut in the middle of it.
_HALF = re.compile(
    rb"\\u[dD][89abAB][\da-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][\da-fA-F]{2})\\u[dD][c-fC-F][\da-fA-F]{2}"
)
_CONTROL = re.compile(rb"[\x00-\x1f]")  # outside of strings these are white space or faults
_RAW_LIST: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])
_PIECE = 512 << 10
_TRIES = 8  # boundaries tried from the end of a piece before more text is read


class _Open(Exception):
    """The piece does not end between two elements."""


class _Ended(Exception):
    """The array is closed inside the piece, at this index."""

    def __init__(self, at: int) -> None:
        self.at = at


def repaired(text: bytes | bytearray) -> bytes:
    """`text` without NaN and the like, bad escapes, half characters and control characters; of the same length, so
    that places hold.

    An empty list stands for what is no number: no field takes it for a value, and inside a string it does no harm.
    """
    text = _NOT_A_NUMBER.sub(lambda m: b"[]".ljust(len(m[0])), text)
    text = _BAD_ESCAPE.sub(lambda m: m[0] if len(m[0]) == 2 else b"/", text)
    text = _HALF.sub(rb"\\ufffd", text)
    return bytes(_CONTROL.sub(b" ", text))


class ArrayPieces(Generic[T]):
    """Batches of elements of a JSON array whose text follows `start` (just behind its `[`).

    `decoder` decodes a list of T. An element that is not of type T goes to `odd(raw)`, which may answer with one or
    count it away with None. `complete` is False if the text ended before the array did; `tail` is what follows the
    array, at most the item limit. Raises `BadInput` with the byte where the text is not JSON at all.
    """

    def __init__(
        self, text: Text, start: bytes, decoder: msgspec.json.Decoder[list[T]], odd: Callable[[bytes], T | None]
    ) -> None:
        self.text = text
        self.complete = False
        self.tail = b""
        self.mended = 0  # pieces that held NaN or the like
        self._decoder = decoder
        self._odd = odd
        self._pending = start
        self._offset = text.size - len(start)  # of the pending text, in the file's text
        self._separator = b""

    def batches(self) -> Iterator[list[T]]:
        wanted = _PIECE
        parts, size = [self._pending], len(self._pending)
        for block in self.text:
            parts.append(block)
            size += len(block)
            if size < wanted:
                continue
            self._pending = b"".join(parts)
            batch = self._take()
            if batch is None and size > self.text.limits.item:
                raise BadInput(
                    f"{self.text.path}: expected events of at most {self.text.limits.item >> 20} MiB, "
                    f"got a longer one at byte {self._offset}"
                )
            wanted = _PIECE if batch is not None else 2 * size
            parts, size = [self._pending], len(self._pending)
            if batch is not None:
                yield batch
            if self.complete:
                self._drain()
                return
        self._pending = b"".join(parts)
        yield from self._last()

    def _drain(self) -> None:
        """Read on to the end (only then a cut file is known), keeping the tail within bounds."""
        parts = [self._pending]
        size = len(self._pending)
        for block in self.text:
            size += len(block)
            if size <= self.text.limits.item:
                parts.append(block)
        self.tail = b"".join(parts)

    def _advance(self, count: int) -> None:
        self._pending = self._pending[count:]
        self._offset += count

    def _take(self) -> list[T] | None:
        """Decode up to the last boundary of the pending text; None if more text is needed."""
        for end, start in self._boundaries():
            try:
                batch = self._decode(b"[" + self._pending[:end] + b"]")
            except _Open:
                continue
            except _Ended as ended:
                return self._close(ended.at)
            self._separator = self._pending[end - 1 : start + 1]
            self._advance(start)
            return batch
        return None

    def _boundaries(self) -> Iterator[tuple[int, int]]:
        """Ends of elements and starts of the next ones, last first: those spelt like the last proven one, then all."""
        tried = set()
        sep = self._separator
        at = len(self._pending)
        for _ in range(2):
            if sep and (at := self._pending.rfind(sep, 0, at)) >= 0:
                tried.add(at)
                yield at + 1, at + len(sep) - 1
        found = [(m.start() + 1, m.end() - 1) for m in _BOUNDARY.finditer(self._pending)]
        for end, start in reversed(found[-_TRIES:]):
            if end - 1 not in tried:
                yield end, start

    def _close(self, at: int) -> list[T]:
        """The array ends at index `at` of the pending text (just behind its bracket)."""
        batch = self._decode(b"[" + self._pending[:at])
        self._advance(at)
        self.complete = True
        return batch

    def _last(self) -> Iterator[list[T]]:
        """What is left at the end of the text: the end of the array, or a cut."""
        if not self._pending.strip():
            return
        try:
            batch = self._decode(b"[" + self._pending)
        except _Ended as ended:
            yield self._close(ended.at)
            self.tail, self._pending = self._pending, b""
            return
        except _Open:
            pass
        else:
            self.complete = True
            yield batch
            return
        # So far the text is JSON, only cut: what is behind the last complete element is dropped.
        body = self._pending.rstrip().removesuffix(b",")
        for end in [len(body), *(end for end, _ in self._boundaries())]:
            try:
                yield self._decode(b"[" + body[:end] + b"]")
                return
            except (_Open, _Ended, BadInput):
                continue

    def _decode(self, piece: bytes) -> list[T]:
        try:
            return self._decoder.decode(piece)
        except msgspec.ValidationError:
            return self._one_by_one(piece)
        except RecursionError:
            raise self._malformed("nested too deep", 1) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the latter up to msgspec 0.19
            words = str(error).replace("'utf-8' codec", "UTF-8")
        if "UTF-8" in words:  # rare, and the only fault whose place msgspec does not tell
            return self._one_by_one(piece.decode("utf-8", "surrogateescape").encode("utf-8", "replace"))
        at = self._position(words, piece)
        mended = piece
        if "trailing comma in array" in words:
            comma = piece.rindex(b",", 0, at)
            mended = piece[:comma] + b" " + piece[comma + 1 :]
        if mended == piece:
            mended = repaired(piece)
        if mended == piece:
            raise self._malformed(words, at)
        self.mended += 1
        return self._one_by_one(mended)

    def _position(self, words: str, piece: bytes) -> int:
        """Where msgspec stopped, as an index of `piece`; raises where that is no fault of the text."""
        if "truncated" in words:
            raise _Open
        found = _BYTE.search(words)
        at = int(found[1]) if found else 0
        if "trailing characters" in words:
            # msgspec names the byte behind the first trailing character; the piece begins with a bracket of ours
            raise _Ended(len(piece[: at - 1].rstrip()) - 1)
        return at

    def _one_by_one(self, piece: bytes) -> list[T]:
        try:
            elements = _RAW_LIST.decode(piece)
        except RecursionError:
            raise self._malformed("nested too deep", 1) from None
        except msgspec.DecodeError as error:
            at = self._position(str(error), piece)
            raise self._malformed(str(error), at) from None
        result: list[T] = []
        for raw in elements:
            try:
                result += self._decoder.decode(b"[" + bytes(raw) + b"]")
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                element = self._odd(bytes(raw))
                if element is not None:
                    result.append(element)
        return result

    def _malformed(self, words: str, at: int) -> BadInput:
        reason = _BYTE.sub("", words.removeprefix("JSON is malformed: ")).strip()
        return BadInput(f"{self.text.path}: malformed JSON at byte {self._offset + at - 1} of the text: {reason}")
