"""What is known of a device, and what a monitor of devices can do."""

from __future__ import annotations

from typing import Protocol

import msgspec

from ..report import Amount, Figure


class DeviceFacts(msgspec.Struct, kw_only=True):
    """What does not change while a process runs. None is unknown."""

    index: int
    vendor: str  # amd, nvidia
    name: str = "unknown"
    arch: str | None = None  # gfx target ("gfx942") or compute capability ("sm_90")
    compute_units: Figure = None  # compute units, or streaming multiprocessors
    memory_bytes: Figure = None
    pci: str | None = None  # "0000:0c:00.0"


class DeviceSample(msgspec.Struct, kw_only=True):
    """One look at one device. Percentages are of the time since the driver's last sample; None is unknown.

    AMD's PCIe figures are upper estimates: messages times the largest payload (kernel documentation of `pcie_bw`).
    """

    index: int
    utilisation_percent: Amount = None
    memory_utilisation_percent: Amount = None
    memory_used_bytes: Figure = None
    power_watts: Amount = None
    temperature_celsius: Amount = None
    pcie_rx_bytes_per_s: Amount = None
    pcie_tx_bytes_per_s: Amount = None


FIGURES = tuple(name for name in DeviceSample.__struct_fields__ if name != "index")


class Monitor(Protocol):
    """An open management library. Methods may be called from any one thread at a time."""

    name: str  # amdsmi, rocm_smi, nvml
    version: str

    def facts(self) -> list[DeviceFacts]: ...

    def sample(self, pcie: bool = True) -> list[DeviceSample]:
        """One sample a device. `pcie`: AMD's drivers measure PCIe for a whole second each time; False leaves it out."""
        ...

    def close(self) -> None: ...


def pci_address(domain: int, bus: int, device: int, function: int) -> str:
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"
