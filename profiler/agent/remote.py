"""Every worker behind a server's URL, as one report."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

from ..report import Report
from .client import Advance, profile_socket, watch_socket
from .relay import Relay, RelayedConnection


def profile_url(
    url: str,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    collectors: str = "auto",
    progress: Advance | None = None,
) -> Report:
    """As `client.profile_socket`, through the endpoint of a server that has our plugin. Raises `NoPlugin` without."""
    return profile_socket(_workers(url), steps=steps, seconds=seconds, collectors=collectors, progress=progress)


def watch_url(url: str, *, interval: float = 1.0, collectors: str = "auto") -> Generator[Report, None, None]:
    """As `client.watch_socket`, through the endpoint of a server that has our plugin. Raises `NoPlugin` without."""
    yield from watch_socket(_workers(url), interval=interval, collectors=collectors)


def _workers(url: str) -> list[partial[RelayedConnection]]:
    relay = Relay(url)
    return [partial(RelayedConnection, relay, worker) for worker in relay.workers]
