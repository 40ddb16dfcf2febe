"""What the planner did in it: counters for the report and for Prometheus."""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple

from ....profiler.report import Note, PlannerFigures
from .mode import Mode

logger = logging.getLogger("syncfree")


class Mark(NamedTuple):
    """The counters at one moment."""

    mismatches: int
    unread: int


class Tally:
    """Counters of one process. Steps count once for each builder: `planned` served, `compared` in shadow.

    `mismatches` and `unread` count fields: planned ones that differ from vLLM's, and those that vLLM filled although no
    kernel on the batch's route reads them. `fallbacks` counts builds that vLLM served instead, by reason.
    """

    def __init__(self) -> None:
        self.clear("off")

    def clear(self, mode: Mode) -> None:
        """Begin anew, in this mode."""
        self.mode: Mode = mode
        self.planned = self.compared = self.mismatches = self.unread = self.forced_waits = 0
        self.first_mismatch: str | None = None
        self.unread_names: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self._told: set[str] = set()

    def mismatch(self, text: str) -> None:
        """A planned field differs: `backend: field: planned ..., vLLM ...`."""
        self.mismatches += 1
        if self.first_mismatch is None:
            self.first_mismatch = text
            logger.warning("syncfree: planner: %s (further mismatches are counted, not logged)", text)

    def fell_back(self, backend: str, error: Exception) -> None:
        """vLLM builds this step itself; the first time of each backend and kind of error is logged."""
        kind = f"{backend}: {type(error).__name__}"
        self.fallbacks[kind] += 1
        if kind not in self._told:
            self._told.add(kind)
            reason = str(error).splitlines()[0] if str(error) else ""
            logger.warning("syncfree: planner: vLLM builds this step itself: %s: %s", kind, reason)

    def declined(self, backend: str, reason: str) -> None:
        """This builder is left to vLLM for good."""
        kind = f"{backend}: {reason}"
        self.fallbacks[kind] += 1
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("syncfree: planner: left to vLLM: %s", kind)

    def mark(self) -> Mark:
        """The counters now."""
        return Mark(self.mismatches, self.unread)

    def figures(self, since: Mark | None = None) -> PlannerFigures:
        """The report's figures: those after `since` (the beginning of a recording), default of the whole process."""
        if self.mode == "off":
            return PlannerFigures()
        before = since or Mark(0, 0)
        shadow = self.mode == "shadow"
        return PlannerFigures(
            mode=self.mode,
            mismatches=self.mismatches - before.mismatches if shadow else None,
            unread=self.unread - before.unread if shadow else None,
            first_mismatch=self.first_mismatch,
        )

    def notes(self) -> list[Note]:
        """What a report should say beside the figures."""
        if self.mode == "off":
            return []
        builds = self.compared if self.mode == "shadow" else self.planned
        done = "compared" if self.mode == "shadow" else "served"
        notes = [Note(kind="planner", text=f"planner {self.mode}: {builds} builds {done} since the process began")]
        if self.unread_names:
            names = ", ".join(sorted(self.unread_names))
            notes.append(Note(kind="planner", text=f"filled by vLLM, read by no kernel of the route: {names}"))
        for reason, count in self.fallbacks.most_common():
            notes.append(Note(kind="planner", text=f"{count} builds by vLLM itself: {reason}", count=count))
        if self.forced_waits:
            text = f"{self.forced_waits} waits of the planner's own for a staging slot"
            notes.append(Note(kind="planner", text=text, count=self.forced_waits))
        return notes


TALLY = Tally()
