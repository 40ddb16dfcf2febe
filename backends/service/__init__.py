"""Plans for schedulers in other processes and other languages: `syncfree serve`, and its Python client.

    with PlanClient() as client:
        plan = client.plan("aiter_mla", Batch.from_lengths([1, 1], [9, 70]))

The wire format is in `docs/service.md`.
"""

from .client import PlanClient
from .server import Service, default_path, serve

__all__ = ["PlanClient", "Service", "default_path", "serve"]
