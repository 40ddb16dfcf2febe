"""vLLM plugin: an agent in every worker, every step classified and divided into phases.

vLLM loads it in the API server, the engine core, each worker and a subprocess that inspects models, so loading only
notes which modules to touch once vLLM has imported them; nothing of vLLM, torch or syncfree's profiler is imported.
"""


def register() -> None:
    """Entry point of `vllm.general_plugins`; may be called several times in one process."""
    from .imports import after_import
    from .targets import HOOKS

    for module, hook in HOOKS.items():
        after_import(module, hook)
