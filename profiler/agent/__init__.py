"""The agent in a serving process, and its client.

In an engine:

    recorder = ensure_agent(rank=rank, engine="mine").recorder
    if recorder.session is not None:  # somebody records
        recorder.begin_step("decode", num_reqs=8, num_tokens=8)
    ...
    recorder.end_step()

From outside: `client.profile_socket(path, seconds=10)`.
"""

from .recorder import Recorder
from .server import Agent, current_agent, ensure_agent

__all__ = ["Agent", "Recorder", "current_agent", "ensure_agent"]
