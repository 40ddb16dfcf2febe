"""Device facts: which GPUs are here and what they are doing, from the vendor's own management library.

AMD SMI where its library is installed, `librocm_smi64` otherwise, NVML for NVIDIA, or none. Importing it loads none.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from ...errors import BadInput, Unreachable
from ...planner.environment import Environment
from .facts import DeviceFacts, DeviceSample, Monitor

__all__ = [
    "SOURCES",
    "DeviceFacts",
    "DeviceSample",
    "Look",
    "Monitor",
    "device_facts",
    "environment",
    "look",
    "look_aside",
    "open_monitor",
]


class Look(msgspec.Struct, kw_only=True):
    """What one look found: the library that answered, its devices, and why others did not."""

    source: str | None = None
    version: str | None = None
    reasons: list[str] = msgspec.field(default_factory=list)
    devices: list[DeviceFacts] = msgspec.field(default_factory=list)


def _amd_smi() -> Monitor:
    from .amd_smi import AmdSmi

    return AmdSmi()


def _rocm_smi() -> Monitor:
    from .rocm_smi import RocmSmi

    return RocmSmi()


def _nvml() -> Monitor:
    from .nvml import Nvml

    return Nvml()


SOURCES: dict[str, Callable[[], Monitor]] = {"amdsmi": _amd_smi, "rocm_smi": _rocm_smi, "nvml": _nvml}


def open_monitor(wanted: str = "auto") -> tuple[Monitor | None, list[str]]:
    """The first management library that finds a device, and why those before it do not. Close it when done.

    Raises `BadInput` for an unknown name.
    """
    if wanted != "auto" and wanted not in SOURCES:
        raise BadInput(f"devices: expected one of auto, {', '.join(SOURCES)}; got {wanted!r}")
    reasons: list[str] = []
    for name in SOURCES if wanted == "auto" else (wanted,):
        try:
            return SOURCES[name](), reasons
        except Unreachable as error:
            reasons.append(str(error))
    return None, reasons


def look() -> Look:
    """The devices of this machine, in this process. Never loads torch."""
    monitor, reasons = open_monitor()
    if monitor is None:
        return Look(reasons=reasons)
    try:
        return Look(source=monitor.name, version=monitor.version, reasons=reasons, devices=monitor.facts())
    finally:
        monitor.close()


def look_aside(timeout_s: float = 30.0) -> Look:
    """As `look`, in a process of its own: a management library that asserts or hangs takes nobody with it."""
    command = [sys.executable, "-m", "syncfree.profiler.devices"]
    try:
        result = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Look(reasons=[f"devices: could not be looked at: {error}"])
    if result.returncode:
        said = result.stderr.decode(errors="replace").strip().splitlines()
        ended = f"signal {-result.returncode}" if result.returncode < 0 else f"exit code {result.returncode}"
        return Look(reasons=[f"devices: a management library ended the look with {ended}: {said[-1] if said else ''}"])
    return msgspec.json.decode(result.stdout, type=Look)


def environment(**known: Any) -> Environment:
    """The planner's environment of this machine: gfx target and compute units of its first AMD card; `known` wins.

    Without an AMD card the planner's own defaults stay.
    """
    card = next((facts for facts in device_facts() if facts.vendor == "amd" and facts.arch), None)
    found: dict[str, Any] = {}
    if card is not None:
        found["gfx"] = card.arch
        if card.compute_units is not None:
            found["num_cu"] = card.compute_units
    return Environment(**(found | known))


def device_facts() -> list[DeviceFacts]:
    """The devices of this machine; empty where no management library finds one."""
    return look_aside().devices
