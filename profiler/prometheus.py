"""Reports as Prometheus metrics, on the loopback interface.

Names follow the Prometheus conventions: base units, `_total` on counters. What a report does not know is absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import BadInput, Unreachable
from .budget import SYNC_KINDS
from .classes import judged_syncs
from .report import Report, Step

if TYPE_CHECKING:
    from .devices.telemetry import Sampler

ADDRESS = "127.0.0.1"
MAX_SITES = 50  # series of source lines: beyond it they are added up as "other"
_STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_DEVICE_GAUGES = {
    "utilisation_percent": ("utilization_ratio", "Share of time in which the device was busy.", 0.01),
    "memory_utilisation_percent": ("memory_utilization_ratio", "Share of time in which its memory was busy.", 0.01),
    "memory_used_bytes": ("memory_used_bytes", "Device memory in use.", 1.0),
    "power_watts": ("power_watts", "Power drawn by the device.", 1.0),
    "temperature_celsius": ("temperature_celsius", "Temperature of the device.", 1.0),
    "pcie_rx_bytes_per_s": ("pcie_receive_bytes_per_second", "Data received over PCIe.", 1.0),
    "pcie_tx_bytes_per_s": ("pcie_transmit_bytes_per_second", "Data sent over PCIe.", 1.0),
}


class Exporter:
    """Serves `http://127.0.0.1:PORT/metrics`; every report given to `observe` is added to the counters.

    `port` 0 takes a free one (see `port`). Raises `Unreachable` without prometheus_client, `BadInput` where the port
    cannot be had.
    """

    def __init__(self, port: int) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            text = "prometheus: prometheus_client is not installed: pip install 'syncfree[prometheus]'"
            raise Unreachable(text) from error
        self.registry = prometheus_client.CollectorRegistry()
        self._make(prometheus_client)
        self._sites: set[tuple[str, str, str]] = set()
        self.sampler: Sampler | None = None  # devices beside reports that carry no telemetry of their own
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, ADDRESS, self.registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise BadInput(f"--prometheus {port}: cannot be served on {ADDRESS}: {reason}") from error
        self.port: int = self._server.server_port

    def _make(self, client: Any) -> None:
        def counter(name: str, text: str, *labels: str) -> Any:
            return client.Counter(f"syncfree_{name}", text, ("rank", "batch_class", *labels), registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Any:
            return client.Gauge(f"syncfree_{name}", text, labels, registry=self.registry)

        self._steps = counter("steps", "Serving steps seen, without warm-up, compilation and capture.")
        self._dirty = counter("steps_with_sync", "Steps in which build or forward waited for the device.")
        self._syncs = counter("syncs", "Host calls that waited for the device.", "kind", "phase")
        self._blocked = counter("blocked_seconds", "Time the host was stopped by such waits.")
        self._launches = counter("launches", "Kernel and graph launch calls.", "kind")
        self._copies = counter("copies", "Copies between host and device.", "direction")
        self._bytes = counter("copied_bytes", "Bytes copied between host and device.", "direction")
        self._duration = client.Histogram(
            "syncfree_step_duration_seconds",
            "Duration of a serving step.",
            ("rank", "batch_class"),
            buckets=_STEP_SECONDS,
            registry=self.registry,
        )
        self._site = client.Counter(
            "syncfree_site_syncs",
            "Waits by the source line that made them.",
            ("site", "function", "kind"),
            registry=self.registry,
        )
        self._devices = {
            figure: gauge(f"device_{name}", text, "device", "name", "arch")
            for figure, (name, text, _) in _DEVICE_GAUGES.items()
        }
        self._planner = {
            "mismatches": client.Counter(
                "syncfree_planner_mismatches",
                "Planned fields that differ from what the engine built (shadow mode).",
                ("mode",),
                registry=self.registry,
            ),
            "unread": client.Counter(
                "syncfree_planner_unread_fields",
                "Fields that the engine filled and no kernel reads (shadow mode).",
                ("mode",),
                registry=self.registry,
            ),
        }
        self._partial = gauge("report_partial", "1 where the last report lacked steps or ranks.")

    # ------------------------------------------------------------------ reports

    def observe(self, report: Report) -> None:
        """Add one window's report: reports of consecutive windows, each step in one of them."""
        for step in report.steps:
            if not step.warmup:
                self._add_step(step)
        for site in report.sites:
            if site.kind != "maybe" and not site.warmup:
                self._add_site(f"{site.file}:{site.line}", site.function, site.kind, site.count)
        telemetry = report.telemetry or (self.sampler.result() if self.sampler is not None else {})
        for device in telemetry.get("devices", ()):
            labels = (str(device["index"]), str(device["name"]), str(device["arch"] or ""))
            for figure, (_, _, scale) in _DEVICE_GAUGES.items():
                if device.get(figure) is not None:
                    self._devices[figure].labels(*labels).set(device[figure]["last"] * scale)
        if report.planner.mode != "off":
            for name, counter in self._planner.items():
                _inc(counter, (report.planner.mode,), getattr(report.planner, name))
        self._partial.set(int(report.source.partial))

    def _add_step(self, step: Step) -> None:
        who = (str(step.rank), step.batch_class)
        self._steps.labels(*who).inc()
        judged = judged_syncs(step)
        if judged is not None:
            self._dirty.labels(*who).inc(int(judged > 0))
        by_phase = {phase: part.syncs for phase, part in step.phases.items()} or {"other": step.syncs}
        for phase, syncs in by_phase.items():
            for kind in SYNC_KINDS:
                _inc(self._syncs, (*who, kind, phase), getattr(syncs, kind))
        _inc(self._blocked, who, None if step.blocked_us is None else step.blocked_us / 1e6)
        _inc(self._launches, (*who, "kernel"), step.launches.kernels)
        _inc(self._launches, (*who, "graph"), step.launches.graphs)
        for direction in ("d2h", "h2d", "d2d"):
            _inc(self._copies, (*who, direction), getattr(step.copies, direction))
        for direction in ("d2h", "h2d"):
            _inc(self._bytes, (*who, direction), getattr(step.copies, f"{direction}_bytes"))
        if step.duration_us is not None:
            self._duration.labels(*who).observe(step.duration_us / 1e6)

    def _add_site(self, site: str, function: str, kind: str, count: int) -> None:
        key = (site, function, kind)
        if key not in self._sites:
            if len(self._sites) >= MAX_SITES:
                key = ("other", "", kind)
            else:
                self._sites.add(key)
        self._site.labels(*key).inc(count)

    def close(self) -> None:
        """Stop serving; returns when the port is free again."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _inc(counter: Any, labels: tuple[str, ...], amount: float | None) -> None:
    """Add a figure; an unknown one makes no series, a known 0 does."""
    if amount is not None:
        counter.labels(*labels).inc(amount)
