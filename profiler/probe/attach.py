"""The client's end of an attachment: starts the helper process, asks it, and makes sure that it goes away.

    with Attachment(pid) as probe:
        probe.run_python("answer = str(1 + 1)")
        probe.install()
        probe.counters(), probe.take_calls()

Works on the own process (the helper then attaches to its parent) and on another one's. `install` without an arena makes
one in the target that lives as long as the hooks; code that outlives the client (an agent in the target that reads the
counters by itself) must bring its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from ...errors import Unreachable
from .. import sites
from ..calls import Call
from ..collectors.base import Counters
from . import arena as layout
from .entry_points import VENDORS, Vendor, encoded
from .events import Decoder
from .tracing import holds_any

_SECONDS = 30.0  # more than any step of an attachment takes; beyond it the target is stuck
# On two processors with twenty programs a vLLM worker was attached to after 29 s. Taking the helper away from a target
# while frida runs code on one of its threads ends the target: then it is left to end by itself (see `close`).
_FIRST_SECONDS = 60.0
_ATTACH_SECONDS = 90.0


class Installed(msgspec.Struct, frozen=True):
    """What was hooked. `pause_ms`: how long the busiest threads of the target stood still for it."""

    vendor: str
    names: list[str]  # by entry number
    missing: list[str]  # found, but too short to hook
    pause_ms: float
    callbacks: dict[str, int]  # addresses, in the target, of the compiled `probe_stack`, `probe_inside`, `probe_waiter`


class _Silence(Unreachable):
    """The helper does not answer."""


class Attachment:
    """A helper process attached to process `pid`. Raises `Unreachable` with the reason wherever it cannot go on.

    `carrier`: the thread that the injection may stop for some tens of milliseconds, as soon as it waits for something;
    default any that does.
    """

    def __init__(self, pid: int, *, carrier: int = 0, seconds: float = _SECONDS) -> None:
        self.pid = pid
        self.seconds = seconds
        self.libraries: list[str] = []
        self.has_python = False
        self.installed: Installed | None = None
        self.arena = 0
        self.lingering = False  # a thread was, or may have been, still inside a hooked call when we left
        self._decoder: Decoder | None = None
        try:
            answer = self._attach(carrier, seconds if seconds < _SECONDS else _FIRST_SECONDS)
        except _Silence:
            # The agent is in, and frida waits for a word of it that does not come. Nothing is hooked yet; another
            # helper gets through.
            if self._carried():
                raise
            answer = self._attach(carrier, seconds if seconds < _SECONDS else _ATTACH_SECONDS)
        self.libraries, self.has_python = answer["libraries"], answer["python"]
        self.attach_seconds: float = answer["seconds"]

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    # --------------------------------------------------------------- asking

    def _attach(self, carrier: int, seconds: float) -> dict[str, Any]:
        self._data = b""
        self._process = _start_helper()
        try:
            if self.pid == os.getpid():
                _allow_tracer(self._process.pid)
            libraries = _prefixes(VENDORS.values())
            more = 0.0 if self.seconds < _SECONDS else _ATTACH_SECONDS
            what = {"pid": self.pid, "tid": carrier, "script": _text("agent.js"), "libraries": libraries}
            return self._ask("attach", seconds, more, **what)
        except _Silence:
            if not self._carried():
                self._process.kill()
            self.close(0.0)
            raise
        except BaseException:
            self.close()
            raise

    def _carried(self) -> bool:
        """Whether the helper has a thread of the target stopped: it must not be killed then."""
        return holds_any(self.pid, self._process.pid)

    def _ask(self, do: str, within: float | None = None, more: float = 0.0, **what: Any) -> dict[str, Any]:
        """Its answer `within` so many seconds, and `more` where it then has a thread of the target stopped."""
        process = self._process
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
            process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise Unreachable(f"process {self.pid}: the attachment has ended") from None
        answer: dict[str, Any] = json.loads(self._line(do, self.seconds if within is None else within, more))
        if "refused" in answer:
            raise Unreachable(answer["refused"])
        if "failed" in answer:
            raise Unreachable(f"process {self.pid}: {do} failed: {answer['failed']}")
        return answer

    def _line(self, do: str, seconds: float, more: float) -> bytes:
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        while b"\n" not in self._data:
            ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(output, 1 << 16) if ready else b""
            if not chunk:
                if not ready and more and self._carried():
                    seconds, deadline, more = seconds + more, deadline + more, 0.0
                    continue
                if not ready:
                    raise _Silence(f"process {self.pid}: no answer to {do} within {seconds:g} s")
                raise Unreachable(f"process {self.pid}: the probe's helper process died")
            self._data += chunk
        line, self._data = self._data.split(b"\n", 1)
        return line

    @property
    def alive(self) -> bool:
        """Whether the helper still runs (it ends with the target)."""
        return self._process.poll() is None

    # --------------------------------------------------------------- hooking

    def run_python(self, code: str) -> str | None:
        """Run `code` in the target's Python, in a namespace of its own, and return the str it leaves in `answer`.

        An exception in the code is dropped there, and the result is None: catch what matters and answer with it.
        """
        answer: str | None = self._ask("python", code=code)["answer"]
        return answer

    def bring(self, data: bytes) -> int:
        """Put `data` into the target; returns its address there, good until the next `bring` or `install`."""
        address: int = self._ask("allocate", size=len(data))["arena"]
        self._ask("poke", at=address, data=data.hex())
        return address

    def vendor(self, preferred: str | None = None) -> Vendor:
        """Whose runtime is loaded in the target. Raises `Unreachable` if none is."""
        loaded = [v for v in VENDORS.values() if any(_is(v, path) for path in self.libraries)]
        if not loaded:
            raise Unreachable(f"process {self.pid} has neither libcuda nor libamdhip64 loaded: nothing to count yet")
        return next((v for v in loaded if v.name == preferred), loaded[0])

    def install(self, *, arena: int = 0, preferred: str | None = None, hip_major: int = 6) -> Installed:
        """Hook every entry point of the table that the target's runtime exports.

        `arena`: address, in the target, of memory laid out by `arena.Arena`; 0 = made by the agent, zeroed.
        `hip_major`: release of a HIP runtime whose file name does not tell it. Raises `Unreachable` where nothing can
        be hooked.
        """
        vendor = self.vendor(preferred)
        self.arena = arena or self._ask("allocate", size=layout.SIZE)["arena"]
        request = {
            "arena": hex(self.arena),
            "libraries": list(vendor.libraries),
            "wanted": encoded(vendor),
            "max_entries": layout.MAX_ENTRIES,
            "offsets": layout.OFFSETS,
            "source": _source(),
            "is_capturing": vendor.is_capturing,
            "pointer_attribute": vendor.pointer_attribute,
            "peek_error": "hipPeekAtLastError" if vendor.name == "hip" else None,
            "clear_error": "hipGetLastError" if vendor.name == "hip" else None,
            "hip_major": hip_major,
        }
        answer = self._ask("install", request=request)
        if not answer["names"]:
            short = f"{len(answer['missing'])} of its entry points are too short, it lacks the others"
            raise Unreachable(f"nothing can be hooked in the {vendor.name} library of process {self.pid}: {short}")
        self.installed = Installed(vendor=vendor.name, **answer)
        self._decoder = Decoder(self.installed.names, self.peek)
        return self.installed

    # --------------------------------------------------------------- reading

    def peek(self, offset: int, size: int) -> bytes:
        """`size` bytes of the arena."""
        return bytes.fromhex(self._ask("peek", at=self.arena + offset, size=size)["data"])

    def poke(self, offset: int, data: bytes) -> None:
        self._ask("poke", at=self.arena + offset, data=data.hex())

    def counters(self) -> Counters:
        """Counts since `install`, all threads of the target."""
        raw = memoryview(self.peek(layout.OFFSETS["counters"], 8 * len(layout.COUNTERS))).cast("q")
        return Counters(**dict(zip(layout.COUNTERS, raw, strict=True)))

    def take_calls(self) -> list[Call]:
        """The sync calls since the last time, with stacks where the target's frames could be calibrated."""
        if self._decoder is None:
            return []
        return self._decoder.decode(layout.take_records(self.peek, self.poke))

    def calibrate_stacks(self) -> str | None:
        """Let the hooks read the target's Python frames. Returns None, or why syncs will have no stacks."""
        if not self.has_python:
            return "no Python in the target"
        code = f"{_text('frames.py')}\n{_CALIBRATE}"
        answer = self.run_python(code) or "the calibration did not run"
        if not answer.startswith("{"):
            return answer
        found = json.loads(answer)
        layout.set_python(self.poke, found["words"], sites.OWN, found["stdlib"])
        return None

    # ------------------------------------------------------------------- end

    def detach(self) -> float:
        """Take every hook out and let the target go. Returns the pause in ms. Never raises: the target may be gone."""
        pause = 0.0
        # Unless we are told otherwise: the target's end has taken the hooks with it, or the agent takes them out by
        # itself, some time after its helper has died.
        self.lingering = self.installed is not None
        if self._process.poll() is None:
            with contextlib.suppress(Unreachable):
                answer = self._ask("detach")
                pause, self.lingering = float(answer["pause_ms"]), not answer["free"]
        self.close()
        return pause

    def close(self, seconds: float | None = None) -> None:
        """End the helper; whatever is still hooked is taken out by it.

        One that does not end within `seconds` is killed, unless it has a thread of the target stopped: that would end
        the target. It then ends by itself when the target answers, or ends.
        """
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        try:
            process.wait(self.seconds if seconds is None else seconds)
        except subprocess.TimeoutExpired:
            if not self._carried():
                process.kill()
                process.wait()
        if self.pid == os.getpid():
            _allow_tracer(0)


_CALIBRATE = """
import json, sysconfig
try:
    answer = json.dumps({"words": calibrate(), "stdlib": sysconfig.get_paths()["stdlib"] + "/"})
except Exception as error:
    answer = str(error) or type(error).__name__
"""


def _is(vendor: Vendor, path: str) -> bool:
    return Path(path).name.startswith(vendor.libraries)


def _prefixes(vendors: Any) -> list[str]:
    return [prefix for vendor in vendors for prefix in vendor.libraries]


def _source() -> str:
    """The hooks as one text: the compiler inside the target finds no files."""
    return re.sub(r'#include "(\w+\.c)"', lambda part: _text(part[1]), _text("probe.c"))


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _start_helper() -> subprocess.Popen[bytes]:
    package = __package__ or "syncfree.profiler.probe"
    start = f"import sys; sys.path[:] = {sys.path!r}; from {package}.helper import main; main()"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONSTARTUP", "LD_PRELOAD")}
    return subprocess.Popen(
        [sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )


def _allow_tracer(pid: int) -> None:
    """Where Yama restricts tracing, a process may name who may trace it: PR_SET_PTRACER. 0 takes it back."""
    import ctypes

    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(pid), 0, 0, 0)
