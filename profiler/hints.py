"""What usually mends a sync of each kind."""

from __future__ import annotations

from .report import Site


def hint_for(site: Site) -> str:
    """One sentence for people; empty where there is nothing better to say than the kind itself."""
    if site.allowed_upstream:
        return "inside a region the engine's own checker allows"
    if site.kind == "d2h":
        if site.repeated:
            return (
                "read once per step and pass the value on, or keep it on the host: the scheduler already knows lengths"
            )
        return "keep a host copy of what the scheduler knows, or copy into pinned memory and wait on an event later"
    if site.kind == "h2d":
        return "build it in pinned memory and copy with non_blocking=True"
    if site.kind in ("stream", "device"):
        return "order work with events or stream.wait_stream() instead of stopping the host"
    if site.kind == "event":
        return "wait later, when the value is needed, or query the event"
    return ""
