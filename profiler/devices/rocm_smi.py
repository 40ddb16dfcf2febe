"""AMD devices through `librocm_smi64` by ctypes: for systems that have no AMD SMI.

Source of the signatures: `rocm_smi.h` (ROCm 5.2 and 6.x agree on all that is used here).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import Unreachable
from .facts import DeviceFacts, DeviceSample, pci_address
from .kfd import compute_nodes

_NAMES = ("librocm_smi64.so", *(f"librocm_smi64.so.{n}" for n in (7, 6, 5, 1)))
_SUCCESS = 0
_VRAM = 0
_EDGE, _CURRENT = 0, 0


class _Version(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("patch", ctypes.c_uint32),
        ("build", ctypes.c_char_p),
    )


def load() -> ctypes.CDLL:
    """The library. Raises `Unreachable` where there is none."""
    roots = [Path(os.environ.get("ROCM_PATH", "/opt/rocm")) / "lib"]
    found = ctypes.util.find_library("rocm_smi64")
    for name in (*(str(root / n) for root in roots for n in _NAMES), *_NAMES, *([found] if found else [])):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise Unreachable("rocm_smi: librocm_smi64 not found: install rocm-smi-lib (Debian: librocm-smi64-1)")


@contextmanager
def _quiet() -> Iterator[Any]:
    """The library reports a machine without a card on stderr; caught here, and yielded as a file."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as caught:
        kept = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield caught
        finally:
            os.dup2(kept, 2)
            os.close(kept)


class RocmSmi:
    """An open `librocm_smi64`. Raises `Unreachable` where it is missing or finds no card."""

    name = "rocm_smi"

    def __init__(self) -> None:
        self._lib = load()
        with _quiet() as said:
            status = self._lib.rsmi_init(ctypes.c_uint64(0))
            said.seek(0)
            words = said.read().decode(errors="replace").split("\n")[0].strip()
        if status != _SUCCESS:
            raise Unreachable(f"rocm_smi: no AMD card here: {words or self._status(status)}")
        count = ctypes.c_uint32()
        self._lib.rsmi_num_monitor_devices(ctypes.byref(count))
        self._count = count.value
        if not self._count:
            self.close()
            raise Unreachable("rocm_smi: no AMD card here: the library lists no device")
        version = _Version()
        self._lib.rsmi_version_get(ctypes.byref(version))
        self.version = f"{version.major}.{version.minor}.{version.patch}"

    def _status(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._lib.rsmi_status_string(ctypes.c_int(status), ctypes.byref(text))
        return (text.value or b"").decode(errors="replace") or f"status {status}"

    def _number(self, function: str, kind: Any, *arguments: int) -> int | None:
        """The one number a getter writes; None where it is not supported here or not in this version."""
        call = getattr(self._lib, function, None)
        result = kind()
        if call is None or call(*(ctypes.c_uint32(a) for a in arguments), ctypes.byref(result)) != _SUCCESS:
            return None
        return int(result.value)

    def facts(self) -> list[DeviceFacts]:
        nodes = compute_nodes()
        result = []
        for index in range(self._count):
            where = self._number("rsmi_dev_pci_id_get", ctypes.c_uint64, index)
            pci = None
            if where is not None:
                pci = pci_address(where >> 32 & 0xFFFF, where >> 8 & 0xFF, where >> 3 & 0x1F, where & 7)
            node = nodes.get(pci or "")
            result.append(
                DeviceFacts(
                    index=index,
                    vendor="amd",
                    name=self._name(index),
                    arch=node.gfx if node else None,
                    compute_units=node.compute_units if node else None,
                    memory_bytes=self._number("rsmi_dev_memory_total_get", ctypes.c_uint64, index, _VRAM),
                    pci=pci,
                )
            )
        return result

    def _name(self, index: int) -> str:
        text = ctypes.create_string_buffer(256)
        if self._lib.rsmi_dev_name_get(ctypes.c_uint32(index), text, ctypes.c_size_t(len(text))) != _SUCCESS:
            return "unknown"
        return text.value.decode(errors="replace")

    def sample(self, pcie: bool = True) -> list[DeviceSample]:
        return [self._sample(index, pcie) for index in range(self._count)]

    def _sample(self, index: int, pcie: bool) -> DeviceSample:
        power = self._number("rsmi_dev_power_ave_get", ctypes.c_uint64, index, 0)
        if power is None:  # newer cards report only the momentary power
            power = self._number("rsmi_dev_current_socket_power_get", ctypes.c_uint64, index)
        temperature = self._number("rsmi_dev_temp_metric_get", ctypes.c_int64, index, _EDGE, _CURRENT)
        received, sent = self._pcie(index) if pcie else (None, None)
        return DeviceSample(
            index=index,
            utilisation_percent=self._number("rsmi_dev_busy_percent_get", ctypes.c_uint32, index),
            memory_utilisation_percent=self._number("rsmi_dev_memory_busy_percent_get", ctypes.c_uint32, index),
            memory_used_bytes=self._number("rsmi_dev_memory_usage_get", ctypes.c_uint64, index, _VRAM),
            power_watts=None if power is None else power / 1e6,
            temperature_celsius=None if temperature is None else temperature / 1e3,
            pcie_rx_bytes_per_s=received,
            pcie_tx_bytes_per_s=sent,
        )

    def _pcie(self, index: int) -> tuple[float | None, float | None]:
        sent, received, largest = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
        status = self._lib.rsmi_dev_pci_throughput_get(
            ctypes.c_uint32(index), ctypes.byref(sent), ctypes.byref(received), ctypes.byref(largest)
        )
        if status != _SUCCESS:
            return None, None
        return float(received.value * largest.value), float(sent.value * largest.value)

    def close(self) -> None:
        self._lib.rsmi_shut_down()
