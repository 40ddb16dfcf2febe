"""NVIDIA devices through NVML (`nvidia-ml-py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import Unreachable
from .facts import DeviceFacts, DeviceSample

# CUDA cores of a streaming multiprocessor by compute capability (CUDA C++ programming guide): NVML tells only cores.
_CORES = {(7, 0): 64, (7, 5): 64, (8, 0): 64, (8, 6): 128, (8, 7): 128, (8, 9): 128, (9, 0): 128, (10, 0): 128}


class Nvml:
    """An open NVML. Raises `Unreachable` where the package, the driver or a card is missing."""

    name = "nvml"

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise Unreachable("nvml: the Python package is not installed: pip install nvidia-ml-py") from error
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
            self.version = str(pynvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError as error:
            raise Unreachable(f"nvml: no NVIDIA driver here: {error}") from error
        if not self._handles:
            self.close()
            raise Unreachable("nvml: no NVIDIA card here: the driver lists no device")

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the driver answers; None where the card or the container does not allow it."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None

    def facts(self) -> list[DeviceFacts]:
        nvml = self._nvml
        result = []
        for index, handle in enumerate(self._handles):
            capability = self._ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
            memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
            pci = self._ask(nvml.nvmlDeviceGetPciInfo, handle)
            cores = self._ask(nvml.nvmlDeviceGetNumGpuCores, handle)
            per_unit = _CORES.get(tuple(capability)) if capability else None
            result.append(
                DeviceFacts(
                    index=index,
                    vendor="nvidia",
                    name=str(self._ask(nvml.nvmlDeviceGetName, handle) or "unknown"),
                    arch=f"sm_{capability[0]}{capability[1]}" if capability else None,
                    compute_units=cores // per_unit if cores and per_unit else None,
                    memory_bytes=memory.total if memory else None,
                    pci=str(pci.busId).lower()[-12:] if pci else None,
                )
            )
        return result

    def sample(self, pcie: bool = True) -> list[DeviceSample]:
        return [self._sample(index, handle, pcie) for index, handle in enumerate(self._handles)]

    def _sample(self, index: int, handle: Any, pcie: bool) -> DeviceSample:
        nvml = self._nvml
        busy = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        received = self._ask(nvml.nvmlDeviceGetPcieThroughput, handle, nvml.NVML_PCIE_UTIL_RX_BYTES) if pcie else None
        sent = self._ask(nvml.nvmlDeviceGetPcieThroughput, handle, nvml.NVML_PCIE_UTIL_TX_BYTES) if pcie else None
        return DeviceSample(
            index=index,
            utilisation_percent=busy.gpu if busy else None,
            memory_utilisation_percent=busy.memory if busy else None,
            memory_used_bytes=memory.used if memory else None,
            power_watts=None if power is None else power / 1e3,
            temperature_celsius=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            pcie_rx_bytes_per_s=None if received is None else received * 1024.0,  # NVML tells KB/s
            pcie_tx_bytes_per_s=None if sent is None else sent * 1024.0,
        )

    def close(self) -> None:
        self._ask(self._nvml.nvmlShutdown)
