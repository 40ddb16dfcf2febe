"""Profiling a live engine from outside, by its process or its URL: what is known here of each engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import BadInput

if TYPE_CHECKING:
    from ..profiler.agent.client import Advance
    from ..profiler.report import Report

# Engine's module, looked for in the target -> module with `register(attached=True)` and `unregister()`.
ENGINES = {"vllm": f"{__package__}.vllm"}


def profile_live(
    *,
    pids: Sequence[int] = (),
    url: str | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    collectors: str = "auto",
    progress: Advance | None = None,
) -> Report:
    """Record the servers that `pids` belong to, or the one at `url`. Raises as `agent.client.profile_socket`.

    By URL: through our endpoint where the server has it; else by the traces that vLLM writes.
    """
    if pids:
        from ..profiler.attach.visit import profile_pid

        return profile_pid(pids, ENGINES, steps=steps, seconds=seconds, collectors=collectors, progress=progress)
    if url is None:
        raise BadInput("profile: expected a process or a URL")
    from ..profiler.agent.relay import NoPlugin, check_url
    from ..profiler.agent.remote import profile_url

    try:
        return profile_url(url, steps=steps, seconds=seconds, collectors=collectors, progress=progress)
    except NoPlugin:
        if collectors not in ("auto", "kineto"):
            raise
    from .vllm.traced import profile_traced

    return profile_traced(check_url(url), steps=steps, seconds=seconds, progress=progress)
