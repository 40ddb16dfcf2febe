"""The attention backends by name: those of this package, and those that other packages declare as entry points."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from ..errors import BadInput
from ..planner.backend import Backend

# triton_mla.py is a kernel of ours: the declaration of vLLM's TRITON_MLA lies beside the other MLA files.
BUILT_IN = {"aiter_fa": "aiter_fa", "aiter_mla": "aiter_mla", "triton": "triton", "triton_mla": "mla_triton"}
GROUP = "syncfree.attention_backends"  # an entry point loads to a `Backend`


def attention_backend(name: str) -> Backend:
    """The declaration of a backend. Raises `BadInput` naming the known ones."""
    if name in BUILT_IN:
        backend: object = importlib.import_module(f".{BUILT_IN[name]}", __package__).BACKEND
    else:
        found = {point.name: point for point in entry_points(group=GROUP)}
        if name not in found:
            known = ", ".join([*BUILT_IN, *sorted(found)])
            raise BadInput(f"backend: expected one of {known}; got {name!r}")
        backend = found[name].load()
    if not isinstance(backend, Backend):
        raise BadInput(f"backend: {name} does not load to a Backend, but to {type(backend).__name__}")
    return backend
