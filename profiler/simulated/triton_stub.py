"""A stand-in for Triton where it is not installed: `kernel[grid](...)` counts one launch and computes nothing."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

from .. import sites
from .recorder import RECORDER
from .tensor import STATE


def _launched(name: str) -> None:
    STATE.runtime.launch(api="cuLaunchKernelEx")
    text = f"Triton kernel {name} is counted but not run on the simulated device: what it writes stays as it was"
    RECORDER.note("blind", text, sites.capture(skip=3))


class Kernel:
    """What `@triton.jit` makes of a function."""

    def __init__(self, function: Any) -> None:
        functools.update_wrapper(self, function)
        self.fn = function

    def __getitem__(self, grid: Any) -> Any:
        return self.run

    def run(self, *args: Any, **kwargs: Any) -> None:
        _launched(getattr(self.fn, "__name__", "kernel"))

    def warmup(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")


class _Language(types.ModuleType):
    """triton.language: any name, since no kernel body is ever run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return types.new_class(name)


def _decorator(function: Any = None, **options: Any) -> Any:
    return Kernel(function) if function is not None else Kernel


def _pass_through(*args: Any, **kwargs: Any) -> Any:
    return lambda kernel: kernel


def _modules() -> dict[str, types.ModuleType]:
    triton, language = types.ModuleType("triton"), _Language("triton.language")
    for module in (triton, language):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    content: dict[str, Any] = {
        "__version__": "0",
        "__path__": [],
        "jit": _decorator,
        "autotune": _pass_through,
        "heuristics": _pass_through,
        "Config": lambda *args, **kwargs: (args, kwargs),
        "cdiv": lambda x, y: -(-x // y),
        "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
        "language": language,
    }
    vars(triton).update(content)
    return {"triton": triton, "triton.language": language}


class _ModulePatch:
    """An entry of sys.modules as an attribute, so that it is restored like one."""

    def __init__(self) -> None:
        self.__dict__ = sys.modules


def install(patches: Any) -> None:
    """Count Triton's launches: real kernels are stubbed where Triton is installed, else a stand-in module is put in."""
    if importlib.util.find_spec("triton") is not None:
        from triton.runtime.jit import JITFunction

        patches.set(JITFunction, "run", lambda self, *args, **kwargs: _launched(self.fn.__name__))
        return
    import torch.utils._triton

    torch.utils._triton.has_triton_package()  # remembered for good: must not remember the stand-in
    for name, module in _modules().items():
        patches.set(_ModulePatch(), name, module)
