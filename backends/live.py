"""Which engines a live process may run, and the modules here that hook them."""

from __future__ import annotations

# Engine's module, looked for in the target -> module with `register(attached=True)` and `unregister()`.
ENGINES = {"vllm": f"{__package__}.vllm"}
