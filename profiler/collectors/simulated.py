"""Collector `simulated`: reads what the simulated device's runtime records. Exact, and nothing waits for real."""

from __future__ import annotations

from ...errors import Unreachable
from ..calls import Call
from ..report import Note
from ..simulated.recorder import RECORDER, Sink
from .base import Counters


class SimulatedCollector:
    """Every call of the simulated device between start and stop.

    Raises `Unreachable` on start where no simulated device is open. `notes()`: hazards (a copy into pinned memory read
    before anything proved it complete) and waits that no counter sees, with file and line.
    """

    name = "simulated"
    rolling = True
    sees = frozenset({"syncs", "maybe", "copies", "bytes", "launches", "captured", "kernels"})
    blind = (
        "time: the simulated device never makes the host wait; polling loops and large pageable uploads are listed in "
        "the notes, not counted; reads of pinned memory through a NumPy array taken earlier; other libraries' kernels"
    )

    def __init__(self) -> None:
        self._sink = Sink()
        self._running = False

    @property
    def kernels_run(self) -> int:
        """Kernels that ran, those of replayed graphs included."""
        return self._sink.kernels_run

    def start(self) -> None:
        if not RECORDER.device_open:
            raise Unreachable(
                "collector simulated: no simulated device is open here: enter `with simulated_device():` first"
            )
        if self._running:
            raise RuntimeError("collector simulated: already started")
        self._sink = Sink()
        self._running = True
        RECORDER.add(self._sink)

    def stop(self) -> None:
        self._running = False
        RECORDER.remove(self._sink)

    def mark(self, now_ns: int) -> Counters | None:
        return None

    def drain(self) -> list[Call]:
        calls, self._sink.calls = self._sink.calls, []
        return calls

    def notes(self) -> list[Note]:
        """Hazards and blind spots seen since the start."""
        return self._sink.notes()
