"""Whether the kernel would let a child of this process trace it, told without trying."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

_CAP_SYS_PTRACE = 1 << 19
_PTRACE_PEEKTEXT = 1
_PR_GET_DUMPABLE = 3


def why_not(libraries: Sequence[str] = ()) -> str | None:
    """The reason why the probe cannot attach to this process; None if nothing speaks against it.

    `libraries`: file names of which one must be loaded; none named = not looked at.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the probe hooks x86-64 Linux only, this is {platform.machine()} {sys.platform}"
    if find_spec("frida") is None:
        return "frida is not installed: pip install 'syncfree[probe]'"
    return _kernel_refusal() or _not_loaded(libraries)


def _status(name: str) -> str:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return line.split(":", 1)[1].strip()
    return "0"


def sandboxed() -> str | None:
    """Whether this process may not call ptrace at all, whoever the target is; None if it may."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Asking to read a process that nobody traces fails with ESRCH, unless a sandbox filters the call itself.
    if libc.ptrace(_PTRACE_PEEKTEXT, os.getpid(), None, None) == -1:
        error = ctypes.get_errno()
        if error in (errno.EPERM, errno.ENOSYS, errno.EACCES):
            return "ptrace is blocked by this container's seccomp profile: add --cap-add=SYS_PTRACE"
    return None


def _kernel_refusal() -> str | None:
    capable = int(_status("CapEff"), 16) & _CAP_SYS_PTRACE
    libc = ctypes.CDLL(None, use_errno=True)
    blocked = sandboxed()
    if blocked is not None:
        return blocked
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    if scope >= 3:
        return "kernel.yama.ptrace_scope is 3: no process may be traced until the next boot"
    if scope == 2 and not capable:
        return "kernel.yama.ptrace_scope is 2: only CAP_SYS_PTRACE may trace"
    if not capable and libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) != 1:
        return "this process is not dumpable (it changed its user, or forbade core dumps): it cannot be traced"
    tracer = int(_status("TracerPid"))
    if tracer:
        return f"this process is being traced by process {tracer} (a debugger?)"
    return None


def _not_loaded(libraries: Sequence[str]) -> str | None:
    if not libraries or loaded(libraries):
        return None
    return f"none of {', '.join(libraries)} is loaded in this process"


def loaded(prefixes: Sequence[str]) -> list[str]:
    """Paths of loaded libraries whose file name starts with one of `prefixes`."""
    paths: dict[str, None] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(None, 5)[5] if line.count("/") else ""
        if path and Path(path).name.startswith(tuple(prefixes)):
            paths[path] = None
    return list(paths)
