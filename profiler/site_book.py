"""Groups counted syncs by the source line that is to blame."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict

from .calls import Direction
from .counting import Sync
from .hints import hint_for
from .report import Site, SiteStep
from .sites import blamed, source_line
from .windows import StepWindow, is_foreign_thread


def thread_names() -> dict[int, str]:
    """Names of this process's threads by native id."""
    return {t.native_id: t.name for t in threading.enumerate() if t.native_id is not None}


class SiteBook:
    """Groups syncs by the line that is to blame."""

    def __init__(self, threads: dict[int, str]) -> None:
        self.sites: dict[tuple[object, ...], Site] = {}
        self.per_step: dict[tuple[object, ...], Counter[int]] = defaultdict(Counter)
        self.foreign: dict[tuple[object, ...], Counter[int]] = defaultdict(Counter)
        self.leads: dict[tuple[object, ...], list[int]] = defaultdict(list)
        self.windows: dict[int, StepWindow] = {}
        self.measured: set[tuple[object, ...]] = set()
        self.names = threads

    def add(self, sync: Sync, phase: str, step: StepWindow | None, index: int) -> None:
        call = sync.call
        frame = blamed(call.stack)
        kind = "d2h" if sync.kind == "copy" and call.direction is Direction.D2H else sync.kind
        where = (frame.file, frame.line, frame.function) if frame else ("", 0, call.api)
        key = (*where, kind, phase, call.allowed_upstream)
        site = self.sites.get(key)
        if site is None:
            source = source_line(frame) if frame else ""
            site = self.sites[key] = Site(
                file=where[0],
                line=where[1],
                function=where[2],
                kind=kind,
                phase=phase,
                blocked_us=0.0,
                allowed_upstream=call.allowed_upstream,
                stack=[f"{f.file}:{f.line} {f.function}" for f in call.stack],
                source=source,
                api=call.api,
            )
        site.count += 1
        if sync.blocked_ns is None or site.blocked_us is None:
            site.blocked_us = None
        else:
            site.blocked_us += sync.blocked_ns / 1e3
        if call.launch_lead_ns is not None:
            self.leads[key].append(call.launch_lead_ns)
        if call.device_idle_ns is not None:
            site.device_idle_us = (site.device_idle_us or 0.0) + call.device_idle_ns / 1e3
        if step is not None:
            site.classes[step.batch_class] = site.classes.get(step.batch_class, 0) + 1
            self.per_step[key][index] += 1
            self.windows[index] = step
            if is_foreign_thread(step, call):
                self.foreign[key][index] += 1
            if not step.warmup:
                self.measured.add(key)
        thread = self.names.get(call.thread, f"thread {call.thread}")
        if thread not in site.threads:
            site.threads.append(thread)
        if call.repeat_value:
            site.repeated = site.same_value = True

    def finish(self) -> list[Site]:
        for key, site in self.sites.items():
            counts = self.per_step.get(key)
            if counts:
                site.per_step = sum(counts.values()) / len(counts)
                site.repeated = site.repeated or max(counts.values()) > 1
                site.warmup = key not in self.measured
                site.steps = [
                    SiteStep(self.windows[i].rank, self.windows[i].index, n, self.foreign[key][i])
                    for i, n in sorted(counts.items())
                ]
            leads = self.leads.get(key)
            if leads:
                site.launch_lead_us = sum(leads) / len(leads) / 1e3
            site.hint = hint_for(site)
        return sorted(self.sites.values(), key=lambda s: (s.warmup, s.kind == "maybe", -s.count, s.file, s.line))
