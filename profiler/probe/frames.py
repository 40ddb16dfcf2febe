"""Where this CPython keeps what a stack walk reads: found by looking at known objects, then verified.

The hooks read the calling thread's own frames without the GIL (see probe.c). The offsets they need differ from one
CPython to the next; instead of a table of versions, they are measured here: make objects whose content is known, find
that content in their memory, and take an offset only where it holds for several objects. Whatever does not fit makes
`calibrate` raise, and syncs are then counted without stacks.

Standard library only, and no import from this package: the attaching client sends this file into its target.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType

Read = Callable[[int, int], bytes]


class LayoutUnknown(Exception):
    """This interpreter's frames cannot be read; the text says why."""


class _Memory:
    """This process's memory through /proc/self/mem: an address that is not mapped is an error, not a crash."""

    def __enter__(self) -> _Memory:
        self.file = os.open("/proc/self/mem", os.O_RDONLY)
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.file)

    def read(self, address: int, size: int) -> bytes:
        try:
            return os.pread(self.file, size, address)
        except (OSError, OverflowError):
            return b""

    def word(self, address: int) -> int:
        data = self.read(address, 8)
        return int.from_bytes(data, "little") if len(data) == 8 else 0

    def words(self, address: int, count: int) -> list[int]:
        data = self.read(address, 8 * count)
        return [value for (value,) in struct.iter_unpack("<Q", data[: len(data) // 8 * 8])]


def _only(what: str, candidates: list[int]) -> int:
    if not candidates:
        raise LayoutUnknown(f"cannot find {what} in this Python {sys.version.split()[0]}")
    return candidates[0]


def _address_of(name: str) -> int:
    try:
        function = getattr(ctypes.pythonapi, name)
    except AttributeError:
        raise LayoutUnknown(f"this Python does not export {name}") from None
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _text_layout(memory: _Memory) -> dict[str, int]:
    parts = ["qz~x", "é~xyz", "Ωabcdef", "𝄞abcdefg"]  # 1 byte ASCII, 1, 2 and 4 bytes a character
    samples = ["".join([part, str(os.getpid() % 7)]) for part in parts]  # made here, so not interned
    raw = [memory.read(id(s), s.__sizeof__()) for s in samples]
    encoded = [s.encode(c) for s, c in zip(samples, ("ascii", "latin-1", "utf-16-le", "utf-32-le"), strict=True)]
    starts = [r.find(e) for r, e in zip(raw, encoded, strict=True)]
    if min(starts) < 0 or len(set(starts[1:])) != 1:
        raise LayoutUnknown("cannot find the characters of a str")
    head = min(starts)

    def at(k: int, size: int) -> list[int]:
        return [int.from_bytes(r[k : k + size], "little") for r in raw]

    length = _only("a str's length", [k for k in range(0, head, 8) if at(k, 8) == [len(s) for s in samples]])
    kinds = [(k, s) for k in range(0, head, 4) for s in range(20) if [v >> s & 7 for v in at(k, 4)] == [1, 1, 2, 4]]
    if not kinds:
        raise LayoutUnknown("cannot find the kind of a str")
    state, shift = kinds[0]
    bits = [b for b in range(shift + 3, 32) if [v >> b & 1 for v in at(state, 4)] == [1, 0, 0, 0]]
    return {
        "text_length": length,
        "text_state": state,
        "text_kind_shift": shift,
        "text_ascii_bit": _only("a str's ASCII flag", bits),
        "text_ascii_data": starts[0],
        "text_wide_data": starts[1],
    }


def _code_layout(memory: _Memory) -> dict[str, int]:
    codes: list[CodeType] = []
    for name in ("calibration_one", "calibration_two"):
        source = f"class {name}_holder:\n def {name}(self, x):\n  y = [x, {name!r}]\n  return y * 3\n"
        outer = compile(source, f"<{name}_file>", "exec")
        holder = next(c for c in outer.co_consts if isinstance(c, CodeType))
        codes.append(next(c for c in holder.co_consts if isinstance(c, CodeType)))
    raw = [memory.read(id(code), code.__sizeof__()) for code in codes]
    words = [[value for (value,) in struct.iter_unpack("<Q", r[: len(r) // 8 * 8])] for r in raw]

    def pointer(what: str, targets: list[int]) -> int:
        both = list(zip(*words, strict=False))
        return 8 * _only(what, [k for k, pair in enumerate(both) if list(pair) == targets])

    return {
        "code_bytecode": CodeType.__basicsize__,  # the trailing array; checked below by the lines it leads to
        "code_file": pointer("a code object's file name", [id(code.co_filename) for code in codes]),
        "code_name": pointer("a code object's name", [id(code.co_qualname) for code in codes]),
    }


def _interpreter_frame(memory: _Memory, frame: FrameType) -> int:
    """Address of the interpreter's own frame behind a frame object."""
    for candidate in memory.words(id(frame), frame.__sizeof__() // 8)[2:6]:
        if candidate and candidate % 8 == 0 and any(w & ~7 == id(frame.f_code) for w in memory.words(candidate, 8)):
            return candidate
    raise LayoutUnknown("cannot find the interpreter frame behind a frame object")


def _chain(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _line(code: CodeType, offset: int) -> int:
    function = ctypes.pythonapi.PyCode_Addr2Line
    function.argtypes, function.restype = [ctypes.py_object, ctypes.c_int], ctypes.c_int
    return int(function(code, offset))


def _frame_layout(memory: _Memory, frames: list[FrameType], codes: dict[str, int]) -> dict[str, int]:
    """`frames`: running frames, innermost first, the first two joined by a plain Python call."""
    known = frames[:4]
    at = [_interpreter_frame(memory, frame) for frame in known]
    words = [memory.words(address, 12) for address in at]
    code = [k for k in range(12) if all(w[k] & ~7 == id(f.f_code) for w, f in zip(words, known, strict=True))]
    previous = [k for k in range(12) if words[0][k] == at[1]]

    def is_instruction(k: int) -> bool:
        for w, frame in zip(words[:2], known[:2], strict=True):
            offset = w[k] - (id(frame.f_code) + codes["code_bytecode"])
            if not -2 <= offset < len(frame.f_code.co_code) or _line(frame.f_code, offset) != frame.f_lineno:
                return False
        return True

    result = {
        "f_code": 8 * _only("a frame's code", code),
        "f_previous": 8 * _only("a frame's caller", previous),
        "f_instruction": 8 * _only("a frame's instruction", [k for k in range(12) if is_instruction(k)]),
    }
    result["shim_code"] = _shim(memory, frames, at[0], {**codes, **result})
    return result


def _cleans_up(memory: _Memory, code: int, layout: dict[str, int]) -> bool:
    """Whether it is CPython's own, between a constructor and its caller (3.12 on): file and name are one text."""
    return memory.word(code + layout["code_file"]) == memory.word(code + layout["code_name"]) == id("__init__")


def _shim(memory: _Memory, frames: list[FrameType], first: int, layout: dict[str, int]) -> int:
    """The code of the frames that stand between C and Python in the chain; 0 where this version has none."""
    codes = [id(frame.f_code) for frame in frames]
    shims: set[int] = set()
    frame, k = first, 0
    for _ in range(3 * len(codes) + 8):
        if not frame:
            break
        code = memory.word(frame + layout["f_code"]) & ~7
        if k < len(codes) and code == codes[k]:
            k += 1
        elif not _cleans_up(memory, code, layout):
            shims.add(code)
        frame = memory.word(frame + layout["f_previous"])
    if k != len(codes) or len(shims) > 1:
        raise LayoutUnknown("the chain of frames does not match sys._getframe()")
    return shims.pop() if shims else 0


def _paths_to_current(memory: _Memory) -> set[tuple[int, int]]:
    """Ways from the thread state to the current frame: (offset, -1), or (offset, offset inside what it points to).

    Every read is made from this very function: a C function has no frame of its own, so this one is the current.
    """
    here = sys._getframe()
    mine = _interpreter_frame(memory, here)
    function = ctypes.pythonapi.PyThreadState_Get
    function.restype = ctypes.c_void_p
    state = int(function() or 0)
    file, pread, unpack = memory.file, os.pread, struct.iter_unpack
    raw = pread(file, 48 * 8, state)
    paths: set[tuple[int, int]] = set()
    for k, (value,) in enumerate(unpack("<Q", raw)):
        if value == mine:
            paths.add((8 * k, -1))
            continue
        if not value or value % 8:
            continue
        try:
            inner = pread(file, 24, value)
        except (OSError, OverflowError):
            continue
        words = unpack("<Q", inner[: len(inner) // 8 * 8])
        paths.update((8 * k, 8 * j) for j, (word,) in enumerate(words) if word == mine)
    return paths


def _state_layout(memory: _Memory) -> dict[str, int]:
    once = _paths_to_current(memory)
    again = functools.reduce(lambda _, __: _paths_to_current(memory), [once, once])  # beyond a border to C
    path = sorted(once & again, key=lambda p: (p[1] >= 0, p))
    if not path:
        raise LayoutUnknown("cannot find the current frame in the thread state")
    return {"frame": path[0][0], "indirect": path[0][1]}


_OTHERS = (
    "others thread_ident frame_bytes code_bytes code_lines code_first_line bytes_length bytes_data type_at "
    "code_type text_type bytes_type"
).split()
_FRAME_BYTES, _CODE_BYTES = 128, 384  # what the hooks have room for


def _others_layout(memory: _Memory, layout: dict[str, int]) -> dict[str, int]:
    """What reading another thread's frames needs besides (see waiter.c); all 0 where it cannot be done here."""
    try:
        if "t" in sys.abiflags:
            raise LayoutUnknown("without a GIL objects are laid out in another way")
        found = {**_thread_layout(memory), **_lines_layout(memory), **_types_layout(memory)}
    except LayoutUnknown:
        return dict.fromkeys(_OTHERS, 0)
    found["frame_bytes"] = 8 + max(layout[name] for name in ("f_code", "f_previous", "f_instruction"))
    found["code_bytes"] = 8 + max(
        found["code_lines"], found["code_first_line"], layout["code_file"], layout["code_name"]
    )
    fits = found["frame_bytes"] <= _FRAME_BYTES and found["code_bytes"] <= _CODE_BYTES and found["bytes_data"] <= 64
    return {**found, "others": int(fits)}


def _thread_layout(memory: _Memory) -> dict[str, int]:
    function = ctypes.pythonapi.PyThreadState_Get
    function.restype = ctypes.c_void_p
    words = memory.words(int(function() or 0), 64)
    numbers = [threading.get_ident(), threading.get_native_id()]
    at = [8 * k for k in range(len(words) - 1) if words[k : k + 2] == numbers]
    return {"thread_ident": _only("a thread state's thread", at)}


def _lines_layout(memory: _Memory) -> dict[str, int]:
    samples = [b"line~table" * 3, b"table~of~lines" * 5]
    raw = [memory.read(id(s), s.__sizeof__()) for s in samples]
    starts = [r.find(s) for r, s in zip(raw, samples, strict=True)]
    if starts[0] < 0 or starts[0] != starts[1]:
        raise LayoutUnknown("cannot find the content of a bytes object")
    lengths = [
        k
        for k in range(0, starts[0], 8)
        if all(r[k : k + 8] == struct.pack("<q", len(s)) for r, s in zip(raw, samples, strict=True))
    ]
    codes = [_lines_layout.__code__.replace(co_firstlineno=line) for line in (0x1234567, 0x89ABCD)]
    codes[1] = codes[1].replace(co_linetable=bytes([*codes[1].co_linetable[:-1], 0x80]))
    raw = [memory.read(id(code), CodeType.__basicsize__) for code in codes]
    tables = [struct.pack("<Q", id(code.co_linetable)) for code in codes]
    numbers = [struct.pack("<i", code.co_firstlineno) for code in codes]
    size = len(raw[0])
    table = [k for k in range(0, size - 7, 8) if [r[k : k + 8] for r in raw] == tables]
    line = [k for k in range(0, size - 3, 4) if [r[k : k + 4] for r in raw] == numbers]
    return {
        "bytes_data": starts[0],
        "bytes_length": _only("the length of a bytes object", lengths),
        "code_lines": _only("a code object's lines", table),
        "code_first_line": _only("a code object's first line", line),
    }


def _types_layout(memory: _Memory) -> dict[str, int]:
    samples: list[tuple[object, type]] = [(_types_layout.__code__, CodeType), ("text" * 3, str), (b"bytes" * 3, bytes)]
    at = [8 * k for k in range(4) if all(memory.word(id(sample) + 8 * k) == id(kind) for sample, kind in samples)]
    return {
        "type_at": _only("an object's type", at),
        "code_type": id(CodeType),
        "text_type": id(str),
        "bytes_type": id(bytes),
    }


def calibrate() -> dict[str, int]:
    """The words of `arena.PYTHON` for this interpreter. Raises `LayoutUnknown` where something does not fit."""
    if sys.implementation.name != "cpython" or sys.version_info < (3, 11) or sys.maxsize < 2**32:
        raise LayoutUnknown(f"stacks need 64-bit CPython 3.11 or later, this is {sys.implementation.name}")
    with _Memory() as memory:
        if not memory.read(id(sys), 8):
            raise LayoutUnknown("/proc/self/mem cannot be read")
        layout = {**_text_layout(memory), **_code_layout(memory), **_state_layout(memory)}

        def outer() -> int:
            def inner() -> None:
                layout.update(_frame_layout(memory, _chain(sys._getframe()), layout))

            inner()
            return 0

        functools.reduce(lambda _, __: outer(), [0, 0])  # through C: a shim frame is then in the chain
        layout |= _others_layout(memory, layout)
    layout["this_thread_state"] = _address_of("PyGILState_GetThisThreadState")
    layout["addr2line"] = _address_of("PyCode_Addr2Line")
    layout["initialized"] = _address_of("Py_IsInitialized")
    layout["ready"] = 1
    return layout


def expected() -> list[tuple[str, str, int]]:
    """(file, qualified name, line) of the caller's frames, innermost first: what a walk must find."""
    frames = _chain(sys._getframe(1))
    return [(f.f_code.co_filename, f.f_code.co_qualname, f.f_lineno or 0) for f in frames]
