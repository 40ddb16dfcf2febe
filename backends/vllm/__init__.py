"""vLLM plugin: an agent in every worker, every step classified and divided into phases.

vLLM loads it in the API server, the engine core, each worker and a subprocess that inspects models, so loading only
notes which modules to touch once vLLM has imported them; nothing of vLLM, torch or syncfree's profiler is imported.
"""


def register(attached: bool = False) -> bool:
    """Entry point of `vllm.general_plugins`; may be called several times in one process.

    `attached`: the process serves already, and `unregister` will follow. Returns whether the hooks are new: False
    where a plugin had put them in.
    """
    from .imports import after_import, waiting
    from .targets import HOOKS, hooked

    if attached:
        if hooked() or waiting():
            return False
        from .watch import prepare

        prepare()
    for module, hook in HOOKS.items():
        after_import(module, hook)
    if not attached:
        from .planned.install import install

        for module, hook in install().items():
            after_import(module, hook)
    return True


def unregister() -> None:
    """Take every hook out of this process, and forget what they knew."""
    from .imports import stop_waiting
    from .targets import unhook
    from .watch import forget

    stop_waiting()
    unhook()
    forget()
