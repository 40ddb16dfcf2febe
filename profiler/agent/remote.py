"""Every worker behind a server's URL, as one report."""

from __future__ import annotations

from functools import partial

from ..report import Report
from .client import Advance, profile_socket
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
    relay = Relay(url)
    connect = [partial(RelayedConnection, relay, worker) for worker in relay.workers]
    return profile_socket(connect, steps=steps, seconds=seconds, collectors=collectors, progress=progress)
