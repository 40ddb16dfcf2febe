"""Whether the kernel lets this process attach to another one, told before anything is tried."""

from __future__ import annotations

import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path

from ..probe.permission import sandboxed

_CAP_SYS_PTRACE = 1 << 19


def why_not(pid: int) -> str | None:
    """The reason why process `pid` cannot be attached to; None if nothing speaks against it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"attaching works on x86-64 Linux only, this is {platform.machine()} {sys.platform}"
    if find_spec("frida") is None:
        return "frida is not installed: pip install 'syncfree[probe]'"
    status = _status(pid)
    if not status:
        return f"process {pid} does not exist"
    capable = bool(int(_status(os.getpid())["CapEff"], 16) & _CAP_SYS_PTRACE)
    return sandboxed() or _kernel(pid, capable) or _owner(pid, status, capable) or _traced(pid, status)


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _kernel(pid: int, capable: bool) -> str | None:
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    if scope >= 3:
        return "kernel.yama.ptrace_scope is 3: no process may be attached to until the next boot"
    if scope >= 1 and not capable:
        which = "only CAP_SYS_PTRACE may attach" if scope == 2 else "only a parent may attach to its child"
        return f"kernel.yama.ptrace_scope is {scope}: {which}: run as root"
    return None


def _owner(pid: int, status: dict[str, str], capable: bool) -> str | None:
    """The kernel's own rule: all user and group ids alike and dumpable, or CAP_SYS_PTRACE."""
    if capable:
        return None
    users, groups = set(status["Uid"].split()[:3]), set(status["Gid"].split()[:3])
    if users != {str(os.geteuid())} or groups != {str(os.getegid())}:
        owner = status["Uid"].split()[1]
        return f"process {pid} belongs to uid {owner}, you are uid {os.geteuid()}: only that user and root may attach"
    try:
        Path(f"/proc/{pid}/maps").read_bytes()
    except PermissionError:
        return f"process {pid} is not dumpable (it changed its user, or forbade core dumps): only root may attach"
    except OSError:
        return f"process {pid} does not exist"
    return None


def _traced(pid: int, status: dict[str, str]) -> str | None:
    tracer = int(status.get("TracerPid", "0"))
    return f"process {pid} is being traced by process {tracer} (a debugger?)" if tracer else None
