"""Samples devices beside a profile, into `report.telemetry`."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any

import msgspec

from . import look_aside, open_monitor
from .facts import FIGURES, DeviceFacts, DeviceSample, Monitor

MAX_SAMPLES = 600  # kept a device: beyond it every other one is dropped and the rest covers twice the time
PCIE_EVERY_S = 5.0  # AMD's drivers measure PCIe for a second at a time


class Sampler:
    """Samples every device each `interval_s` seconds while open; `result()` is the report's telemetry.

    Never fails and never holds up what it runs beside: one daemon thread opens the management library (after a look in
    a process of its own, since such a library may end its process) and sleeps between samples. Without a library or a
    device the result says why.
    """

    def __init__(self, interval_s: float = 0.5, monitor: Monitor | None = None) -> None:
        self._interval = interval_s
        self._monitor = monitor
        self._facts: list[DeviceFacts] = []
        self._reason = ""
        self._samples: list[tuple[float, list[DeviceSample]]] = []
        self._stride = 1  # one of so many samples is kept
        self.taken = 0  # samples so far
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._started = time.monotonic()

    def __enter__(self) -> Sampler:
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="syncfree-telemetry", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self.join()

    def join(self) -> None:
        """Wait until the sampling has ended: stopped, or given up."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        if not self._open():
            return
        next_pcie = 0.0
        while True:
            now = time.monotonic()
            pcie = now >= next_pcie
            if pcie:
                next_pcie = now + PCIE_EVERY_S
            self.take(pcie)
            if self._stop.wait(self._interval):
                return

    def _open(self) -> bool:
        if self._monitor is None:
            look = look_aside()
            if look.source is not None:
                self._monitor, look.reasons = open_monitor(look.source)
            self._reason = "" if self._monitor is not None else "; ".join(look.reasons)
        return self._monitor is not None

    def take(self, pcie: bool = True) -> None:
        """Sample once, now."""
        if self._monitor is None:
            return
        at = time.monotonic() - self._started
        try:
            samples = self._monitor.sample(pcie)
        except Exception as error:  # noqa: BLE001 - a vendor's library must not end the profile it runs beside
            self._reason = f"{type(error).__name__}: {error}"
            self._stop.set()
            return
        if self.taken % self._stride == 0:
            self._samples.append((at, samples))
        self.taken += 1
        if len(self._samples) > MAX_SAMPLES:
            del self._samples[1::2]
            self._stride *= 2

    def result(self) -> dict[str, Any]:
        """`{source, version, reason, samples, interval_s, devices: [facts + {figure: {mean, max, last}} + series]}`."""
        monitor = self._monitor
        result: dict[str, Any] = {
            "source": monitor.name if monitor else None,
            "version": monitor.version if monitor else None,
            "reason": self._reason or None,
            "interval_s": self._interval * self._stride,
            "samples": self.taken,
            "devices": [],
        }
        if monitor is not None:
            self._facts = self._facts or monitor.facts()
            result["devices"] = [
                {**msgspec.structs.asdict(facts), **self._figures(facts.index)} for facts in self._facts
            ]
        return result

    def _figures(self, index: int) -> dict[str, Any]:
        mine = [(at, s) for at, samples in self._samples for s in samples if s.index == index]
        figures: dict[str, Any] = {}
        for name in FIGURES:
            values = [value for _, s in mine if (value := getattr(s, name)) is not None]
            figures[name] = (
                {"mean": sum(values) / len(values), "max": max(values), "last": values[-1]} if values else None
            )
        series = {name: [getattr(s, name) for _, s in mine] for name in ("utilisation_percent", "power_watts")}
        return {**figures, "series": {"t_s": [round(at, 3) for at, _ in mine], **series}}

    def close(self) -> None:
        """Let go of the management library; the result stays."""
        if self._monitor is not None:
            self._facts = self._facts or self._monitor.facts()
            self._monitor.close()
