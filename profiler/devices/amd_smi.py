"""AMD devices through AMD SMI's own Python package (`amdsmi`), where its library is installed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import Unreachable
from .facts import DeviceFacts, DeviceSample
from .kfd import compute_nodes

# What is called of the package, each with one processor handle.
USED = (
    "amdsmi_get_gpu_device_bdf",
    "amdsmi_get_gpu_asic_info",
    "amdsmi_get_gpu_vram_usage",
    "amdsmi_get_gpu_activity",
    "amdsmi_get_power_info",
    "amdsmi_get_gpu_pci_throughput",
)


def library_found() -> bool:
    """Whether `libamd_smi` can be loaded. Asked first: the package prints on stdout where it cannot."""
    for name in (str(Path(os.environ.get("ROCM_PATH", "/opt/rocm")) / "lib" / "libamd_smi.so"), "libamd_smi.so"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


class AmdSmi:
    """An open AMD SMI. Raises `Unreachable` where the library or package is missing, or finds no card."""

    name = "amdsmi"

    def __init__(self) -> None:
        if not library_found():
            raise Unreachable("amdsmi: libamd_smi not found: install amd-smi-lib")
        try:
            import amdsmi
        except (ImportError, AttributeError, KeyError, OSError) as error:  # library and package of two ages
            raise Unreachable(f"amdsmi: the Python package cannot be used: {error}: pip install amdsmi") from error
        self._smi = amdsmi
        try:
            amdsmi.amdsmi_init()
            self._handles = list(amdsmi.amdsmi_get_processor_handles())
        except amdsmi.AmdSmiException as error:
            raise Unreachable(f"amdsmi: no AMD card here: {error}") from error
        if not self._handles:
            self.close()
            raise Unreachable("amdsmi: no AMD card here: the library lists no device")
        version = self._ask(amdsmi.amdsmi_get_lib_version) or {}
        self.version = ".".join(str(version.get(key, "?")) for key in ("major", "minor", "release"))

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the library answers; None where it cannot on this card."""
        try:
            return function(*arguments)
        except self._smi.AmdSmiException:
            return None

    def _table(self, function: str, handle: Any) -> dict[str, Any]:
        return self._ask(getattr(self._smi, function), handle) or {}

    def facts(self) -> list[DeviceFacts]:
        nodes = compute_nodes()
        result = []
        for index, handle in enumerate(self._handles):
            pci = self._ask(self._smi.amdsmi_get_gpu_device_bdf, handle)
            asic = self._table("amdsmi_get_gpu_asic_info", handle)
            total = _number(self._table("amdsmi_get_gpu_vram_usage", handle).get("vram_total"))
            node = nodes.get(str(pci).lower())
            units = _number(asic.get("num_compute_units"))
            result.append(
                DeviceFacts(
                    index=index,
                    vendor="amd",
                    name=_text(asic.get("market_name")) or "unknown",
                    arch=node.gfx if node else _text(asic.get("target_graphics_version")),
                    compute_units=int(units) if units is not None else (node.compute_units if node else None),
                    memory_bytes=None if total is None else int(total) << 20,
                    pci=_text(pci),
                )
            )
        return result

    def sample(self, pcie: bool = True) -> list[DeviceSample]:
        return [self._sample(index, handle, pcie) for index, handle in enumerate(self._handles)]

    def _sample(self, index: int, handle: Any, pcie: bool) -> DeviceSample:
        activity = self._table("amdsmi_get_gpu_activity", handle)
        power = self._table("amdsmi_get_power_info", handle)
        used = _number(self._table("amdsmi_get_gpu_vram_usage", handle).get("vram_used"))
        traffic = self._table("amdsmi_get_gpu_pci_throughput", handle) if pcie else {}
        watts = (_number(power.get(key)) for key in ("current_socket_power", "average_socket_power", "socket_power"))
        return DeviceSample(
            index=index,
            utilisation_percent=_number(activity.get("gfx_activity")),
            memory_utilisation_percent=_number(activity.get("umc_activity")),
            memory_used_bytes=None if used is None else int(used) << 20,
            power_watts=next((value for value in watts if value is not None), None),
            temperature_celsius=self._temperature(handle),
            pcie_rx_bytes_per_s=_traffic(traffic, "received"),
            pcie_tx_bytes_per_s=_traffic(traffic, "sent"),
        )

    def _temperature(self, handle: Any) -> float | None:
        smi = self._smi
        for sensor in (smi.AmdSmiTemperatureType.EDGE, smi.AmdSmiTemperatureType.HOTSPOT):
            found = self._ask(smi.amdsmi_get_temp_metric, handle, sensor, smi.AmdSmiTemperatureMetric.CURRENT)
            if _number(found) is not None:
                return float(found)
        return None

    def close(self) -> None:
        self._ask(self._smi.amdsmi_shut_down)


def _number(value: Any) -> float | None:
    """A number; the package writes "N/A" where a card has none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value not in ("", "N/A") else None


def _traffic(table: dict[str, Any], key: str) -> float | None:
    messages, largest = _number(table.get(key)), _number(table.get("max_pkt_sz"))
    return None if messages is None or largest is None else messages * largest
