"""Profiling a live engine from outside, by its process or its URL: what is known here of each engine."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BadInput, Unreachable

if TYPE_CHECKING:
    from ..profiler.agent.client import Advance
    from ..profiler.report import Report

# Engine's module, looked for in the target -> module with `register(attached=True)` and `unregister()`.
ENGINES = {"vllm": f"{__package__}.vllm"}


def profile_live(
    *,
    paths: Sequence[Path] = (),
    pids: Sequence[int] = (),
    url: str | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    collectors: str = "auto",
    progress: Advance | None = None,
) -> Report:
    """Record the agents at `paths`, the servers that `pids` belong to, or the one at `url`; one of them at most.

    None of them: every agent found on this machine. By URL: through our endpoint where the server has it; else by the
    traces that vLLM writes. Raises as `agent.client.profile_socket`.
    """
    _one(paths, pids, url)
    if pids:
        from ..profiler.attach.visit import profile_pid

        return profile_pid(pids, ENGINES, steps=steps, seconds=seconds, collectors=collectors, progress=progress)
    if url is None:
        from ..profiler.agent.client import profile_socket

        return profile_socket(paths or None, steps=steps, seconds=seconds, collectors=collectors, progress=progress)
    from ..profiler.agent.relay import NoPlugin, check_url
    from ..profiler.agent.remote import profile_url

    try:
        return profile_url(url, steps=steps, seconds=seconds, collectors=collectors, progress=progress)
    except NoPlugin:
        if collectors not in ("auto", "kineto"):
            raise _needs_endpoint(url, f"collectors {collectors}") from None
    from .vllm.traced import profile_traced

    return profile_traced(check_url(url), steps=steps, seconds=seconds, progress=progress)


def watch_live(
    *,
    paths: Sequence[Path] = (),
    pids: Sequence[int] = (),
    url: str | None = None,
    interval: float = 2.0,
    collectors: str = "auto",
) -> Generator[Report, None, None]:
    """A report of each `interval` seconds of the same targets as `profile_live`, without an end.

    What was brought into processes is taken out again when the generator is closed.
    """
    _one(paths, pids, url)
    if pids:
        from ..profiler.attach.visit import watch_pid

        yield from watch_pid(pids, ENGINES, interval=interval, collectors=collectors)
    elif url is None:
        from ..profiler.agent.client import watch_socket

        yield from watch_socket(paths or None, interval=interval, collectors=collectors)
    else:
        from ..profiler.agent.relay import NoPlugin
        from ..profiler.agent.remote import watch_url

        try:
            yield from watch_url(url, interval=interval, collectors=collectors)
        except NoPlugin:
            raise _needs_endpoint(url, "a live view") from None


def _one(paths: Sequence[Path], pids: Sequence[int], url: str | None) -> None:
    if bool(paths) + bool(pids) + (url is not None) > 1:
        raise BadInput("expected sockets, processes or a URL, got more than one of them")


def _needs_endpoint(url: str, what: str) -> Unreachable:
    from .vllm.traced import MEND

    return Unreachable(f"{url}: has no syncfree endpoint, which {what} needs: {MEND}")
