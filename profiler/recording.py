"""What one process recorded, before it is aggregated: plain data that can travel from a server to its profiler."""

from __future__ import annotations

import msgspec

from .aggregate import Evidence, build_report
from .report import Note, PlannerFigures, Report, Source
from .site_book import thread_names
from .windows import StepWindow


class Recording(msgspec.Struct, kw_only=True):
    """Steps and evidence of one rank. `threads`: names by native id, of the process that recorded."""

    source: Source = msgspec.field(default_factory=Source)
    steps: list[StepWindow] = msgspec.field(default_factory=list)
    evidence: list[Evidence] = msgspec.field(default_factory=list)
    notes: list[Note] = msgspec.field(default_factory=list)
    threads: dict[int, str] = msgspec.field(default_factory=thread_names)
    planner: PlannerFigures = msgspec.field(default_factory=PlannerFigures)

    def build(self) -> Report:
        """The report of this recording; where several collectors counted, its notes tell whether they agree."""
        from .readers.run_ahead import fill_report
        from .verify import compare

        report = build_report(self.steps, self.evidence, self.source, self.notes, threads=self.threads)
        for item in self.evidence:  # the first that tells when the device worked
            if any(call.launch_lead_ns is not None for call in item.calls):
                fill_report(report, self.steps, item.calls)
                break
        report.verification, told = compare(self.steps, self.evidence)
        report.notes += told
        report.planner = self.planner
        return report
