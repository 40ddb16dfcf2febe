"""Opening and closing the simulated device of the process."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import Unreachable
from .recorder import RECORDER

_LOCK = threading.Lock()


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise Unreachable("simulated device: torch is not installed: pip install 'syncfree[torch]'") from error
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        raise Unreachable(f"simulated device: expected torch >= 2.11, got {torch.__version__}")
    return torch


def _register(torch: Any) -> None:
    """Register the backend behind the device; a process can do that once, and it stays registered."""
    from .backward import guard
    from .tensor import BACKEND, STATE

    if STATE.cpp_device is not None:
        return
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise Unreachable(f"simulated device: this process already has a custom torch device, {taken!r}")

    if torch.cuda.is_available():
        warnings.warn(
            "simulated device: this process sees a real GPU; once the simulated device is registered, torch refuses "
            "pinned memory and backward on the real one for the rest of the process",
            RuntimeWarning,
            stacklevel=6,
        )

    class Hooks(torch._C._acc.PrivateUse1Hooks):  # type: ignore[misc]
        def is_available(self) -> bool:
            return RECORDER.device_open

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, device_index: int) -> bool:
            return RECORDER.device_open

    class Module:
        """What torch asks of a device module."""

        is_available = staticmethod(lambda: RECORDER.device_open)
        is_initialized = staticmethod(lambda: True)
        current_device = staticmethod(lambda: 0)
        device_count = staticmethod(lambda: int(RECORDER.device_open))
        manual_seed_all = staticmethod(lambda seed: None)
        _is_in_bad_fork = staticmethod(lambda: False)

    torch.utils.backend_registration._setup_privateuseone_for_python_backend(BACKEND, Module(), Hooks(), guard())
    STATE.cpp_device = torch.device(BACKEND, 0)


@contextmanager
def opened() -> Iterator[Any]:
    """The simulated device, open. Raises `RuntimeError` where one is open already."""
    torch = _torch()
    with _LOCK:
        if RECORDER.device_open:
            raise RuntimeError("simulated device: one is already open in this process; they cannot be nested")
        _register(torch)
        RECORDER.device_open = True
    from . import backward, torch_api, triton_stub
    from .memory import Allocator, PinnedMemory
    from .modes import modes
    from .patches import Patches, install
    from .runtime import Runtime
    from .tensor import DEVICE, STATE

    STATE.runtime = Runtime()
    STATE.allocator, STATE.pinned = Allocator(STATE.runtime), PinnedMemory(STATE.runtime)
    patches = Patches()
    compile_again: Callable[[], None] | None = None
    try:
        install(patches)
        triton_stub.install(patches)
        backward.install(patches)
        compile_again = torch_api.install(patches)
        with modes():
            yield DEVICE
    finally:
        patches.undo()
        if compile_again is not None:
            compile_again()
        RECORDER.device_open = False
