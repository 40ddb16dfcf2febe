"""The process that owns frida: attaches to one target, and does what its client asks, line by line.

Started by attach.py with a pipe each way; one JSON object a line. It ends when the client closes the pipe, when the
target ends, or when it is told to; then every hook is taken out. It writes nothing to disk, and starts no process:
frida would unpack and start a device daemon of its own that outlives it, which a TMPDIR that cannot exist prevents.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from . import carrier, patience, tracing

Answer = dict[str, Any]


class Refused(Exception):
    """What was asked cannot be done; the text goes to the client as its reason."""


class Helper:
    """One attachment. Every method named in `_ASKED` answers one kind of request."""

    def __init__(self) -> None:
        self.session: Any = None
        self.script: Any = None
        self.pid = 0
        self.gone = False
        self.clock: patience.SlowClock | None = None
        self.shared = False  # another client's agent is in the target, and stays
        self.patches: list[tracing.Patch] = []
        self.code: list[tuple[int, int]] = []
        self.restorers: list[int] = []  # where signal handlers of the target return to
        self.seen = 0  # the byte by which the agent learns that nobody is in the code any more

    # ------------------------------------------------------------- requests

    def attach(self, ask: Answer) -> Answer:
        """Inject the agent, carried by an idle thread where there is one."""
        os.environ["TMPDIR"] = "/proc/none"
        import frida

        self.pid = ask["pid"]
        began = time.monotonic()
        if not tracing.threads_of(self.pid):
            raise Refused(f"process {self.pid} does not exist")
        self.clock, guard = _in_frida(patience.SlowClock), _in_frida(carrier.Guard)
        tid = carrier.idle_thread(self.pid, ask.get("tid") or 0, guarded=guard is not None)
        try:
            tracing.consent(self.pid, tid)
            self.shared = _agent_mapped(self.pid)
            stops = nullcontext() if guard is None else guard.stops(self.pid, tid)
            with self._patience(), carrier.on_our_processors(tid), stops:
                self.session = frida.attach(tid)
        except (
            PermissionError,
            frida.PermissionDeniedError,
            frida.ProcessNotFoundError,
            frida.NotSupportedError,
        ) as error:
            raise Refused(_reason(self.pid, str(error))) from None
        except frida.TransportError as error:
            raise Refused(f"the target closed the connection: {error}") from None
        self.session.on("detached", self._detached)
        self.script = self.session.create_script(ask["script"], name="syncfree")
        self.script.load()
        api = self.script.exports_sync
        return {
            "libraries": api.libraries(ask["libraries"]),
            "python": api.has_python(),
            "carrier": tid,
            "seconds": time.monotonic() - began,
        }

    def _detached(self, reason: str, *_: object) -> None:
        self.gone = True

    def allocate(self, ask: Answer) -> Answer:
        return {"arena": int(self.script.exports_sync.allocate(ask["size"]), 16)}

    def install(self, ask: Answer) -> Answer:
        """Prepare the hooks, then write all jumps in one standstill."""
        made = self.script.exports_sync.prepare(ask["request"])
        self.patches = [
            tracing.Patch(name, int(at, 16), bytes(before), bytes(after), length)
            for name, _, at, before, after, length in made["hooks"]
        ]
        self.code = [(int(base, 16), size) for base, size in made["code"]]
        self.seen = int(made["seen"], 16)
        if not self.patches:
            return {"names": [], "missing": made["missing"], "pause_ms": 0.0, "callbacks": {}}
        self.restorers = [int(at, 16) for at in self.script.exports_sync.restorers()]
        pause = tracing.apply(self.pid, self.patches, self.restorers)
        return {
            "names": made["names"],
            "missing": made["missing"],
            "pause_ms": pause * 1e3,
            "callbacks": {name: int(at, 16) for name, at in self.script.exports_sync.callbacks().items()},
        }

    def python(self, ask: Answer) -> Answer:
        return {"answer": self.script.exports_sync.python(ask["code"])}

    def peek(self, ask: Answer) -> Answer:
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            return {"data": os.pread(memory.fileno(), ask["size"], ask["at"]).hex()}

    def poke(self, ask: Answer) -> Answer:
        with open(f"/proc/{self.pid}/mem", "r+b", buffering=0) as memory:
            os.pwrite(memory.fileno(), bytes.fromhex(ask["data"]), ask["at"])
        return {}

    def detach(self, ask: Answer) -> Answer:
        """Take the hooks out, wait until nobody is in them, and unload."""
        pause, free = 0.0, True
        if self.script is None or self.gone:
            return {"pause_ms": 0.0, "free": True}
        if self.patches:
            seconds = ask.get("seconds", 20.0)
            pause, free = tracing.revert(self.pid, self.patches, self.code, self._inside, seconds, self.restorers)
            self.patches = []
        with self._patience():
            if free:
                self._tell_that_nobody_is_inside()
                self.script.unload()
            else:  # a thread sits in a wait that we entered before it: the code has to outlive us
                self.script.eternalize()
            self._hang_up()
            self.script = self.session = None
            self._wait_for_frida()
        self._wait_for_the_agent()
        return {"pause_ms": pause * 1e3, "free": free}

    def _tell_that_nobody_is_inside(self) -> None:
        if self.seen:
            with suppress(OSError):  # the target has just ended
                self.poke({"at": self.seen, "data": "01"})

    def _hang_up(self) -> None:
        """End the session by closing our end of the agent's connection, as our death would.

        Asked to leave (`session.detach`), the agent closes its end itself and ends its main loop. Once in some hundred
        times GLib's report that the connection is closed reaches that loop after its end: it is never dispatched, its
        reference keeps the connection, and the agent, which waits for its last connection to go, never leaves. Of
        an end that we close it hears before it begins to leave.
        """
        connections = agent_connections()
        if len(connections) == 1:
            self.session.off("detached", self._detached)
            with connections[0] as connection:
                connection.shutdown(socket.SHUT_RDWR)
        else:
            self.session.detach()
        for connection in connections:
            connection.close()

    def _wait_for_frida(self, seconds: float = 20.0) -> None:
        """Until it has freed its memory, by calls that it makes on a stopped thread of the target.

        That thread would be lost if we ended half way through one. An agent that never leaves is not waited for longer:
        frida then holds no thread (see `wait_until_let_go`), and the client has other things to do.
        """
        import frida

        ending = threading.Thread(target=frida.shutdown, daemon=True)
        ending.start()
        ending.join(seconds)

    def _wait_for_the_agent(self, seconds: float = 5.0) -> None:
        """Until it is unmapped: who attaches next must not meet one that is just leaving."""
        deadline = time.monotonic() + seconds
        while not self.shared and time.monotonic() < deadline and _agent_mapped(self.pid):
            time.sleep(0.01)

    def _patience(self) -> AbstractContextManager[None]:
        return nullcontext() if self.clock is None else self.clock.patient()

    def _inside(self) -> int:
        return int(self.script.exports_sync.inside())

    # ----------------------------------------------------------------- life

    def serve(self, reader: int, writer: int) -> None:
        asked: dict[str, Callable[[Answer], Answer]] = {
            name: getattr(self, name) for name in ("attach", "allocate", "install", "python", "peek", "poke", "detach")
        }
        for line in self._lines(reader):
            ask = json.loads(line)
            try:
                answer = asked[ask.pop("do")](ask)
            except (Refused, tracing.TracingRefused) as error:
                answer = {"refused": _one_line(error)}
            except Exception as error:  # noqa: BLE001 - the client must get an answer, whatever frida raises
                answer = {"refused" if self.gone else "failed": _one_line(error)}
            os.write(writer, json.dumps(answer).encode() + b"\n")

    def _lines(self, reader: int) -> Any:
        """Lines from the client until it goes away or the target ends."""
        poller = select.poll()
        poller.register(reader, select.POLLIN | select.POLLHUP)
        parent = _watch(os.getppid())
        if parent is not None:
            poller.register(parent, select.POLLIN)
        data = b""
        while True:
            ready = dict(poller.poll(1000))
            if self.gone and self.script is not None and reader not in ready:
                return
            if reader in ready:
                chunk = os.read(reader, 1 << 16)
                if not chunk:
                    return
                data += chunk
                while b"\n" in data:
                    line, data = data.split(b"\n", 1)
                    yield line
            elif parent is not None and parent in ready:
                return  # a forked child of the client may still hold the other end of the pipe

    def close(self) -> None:
        if self.session is not None and not self.gone:
            self.detach({"seconds": 10.0})

    def wait_until_let_go(self, seconds: float = 300.0) -> None:
        """Until frida holds no thread of the target: one taken from it half way would never go on with its own work."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and tracing.holds_any(self.pid):
            time.sleep(0.01)


_Installed = TypeVar("_Installed", patience.SlowClock, carrier.Guard)


def _in_frida(kind: type[_Installed]) -> _Installed | None:
    """Put into frida's table of imports; None where its library is built in a way that we do not know.

    Without the slow clock its own limits hold, without the guard a carrier has to have waited for longer.
    """
    from frida import _frida

    try:
        made = kind(str(Path(_frida.__file__).resolve()))
    except (LookupError, OSError):
        return None
    made.install()
    return made


def agent_connections() -> list[socket.socket]:
    """Duplicates of this process's sockets of which it has made both ends: frida's to its agent is one of them.

    (The other end of frida's socket to its loader was made by the target.)
    """
    found: dict[int, socket.socket] = {}  # by inode: our own duplicates are in the list as well
    for path in Path("/proc/self/fd").iterdir():
        try:
            if not str(path.readlink()).startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(path.name)))
        except OSError:  # closed meanwhile, by another thread
            continue
        number = os.fstat(connection.fileno()).st_ino
        listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        ours = connection.family == socket.AF_UNIX and not listens and _peer(connection) == os.getpid()
        if ours and number not in found:
            found[number] = connection
        else:
            connection.close()
    return list(found.values())


def _peer(connection: socket.socket) -> int:
    """The process that the kernel names as the other end's: for a pair of sockets, who made the pair."""
    pid, _, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def _agent_mapped(pid: int) -> bool:
    try:
        return "/memfd:frida-agent" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def _watch(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _reason(pid: int, text: str) -> str:
    """What the kernel's refusal most likely means here."""
    if not Path(f"/proc/{pid}").exists():
        return f"process {pid} does not exist"
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        scope = "0"
    hint = {
        "1": "; kernel.yama.ptrace_scope is 1: run as root, or let the target call prctl(PR_SET_PTRACER)",
        "2": "; kernel.yama.ptrace_scope is 2: only CAP_SYS_PTRACE may attach",
        "3": "; kernel.yama.ptrace_scope is 3: nobody may attach until the next boot",
    }.get(scope, "; same user and CAP_SYS_PTRACE (docker run --cap-add=SYS_PTRACE) or the target's consent are needed")
    return f"attaching to process {pid} was refused: {text}{hint}"


def main() -> None:
    """Entry point of the helper process: requests on standard input, answers on standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client, which then closes the pipe
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    writer, errors = os.dup(1), os.dup(2)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)  # whatever a library prints must not mix with the answers,
    os.dup2(silence, 2)  # and frida complains that it cannot start its daemon
    helper = Helper()
    try:
        helper.serve(0, writer)
    finally:
        try:
            helper.close()
        except Exception as error:  # noqa: BLE001 - the target may be gone half way through
            if not helper.gone:
                os.write(errors, f"syncfree: probe: {_one_line(error)}\n".encode())
        helper.wait_until_let_go()
        os._exit(0)  # frida's threads may not end by themselves
