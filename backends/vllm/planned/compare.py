"""Shadow: the planner's fields against vLLM's. On a GPU without a wait: copies that are read in a later step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ....planner.plan import FieldPlan, MetadataPlan
from .adapter import Adapter
from .tally import Tally

SAMPLE_EVERY = 16  # builds: on a GPU the contents of device tensors are compared in one of so many


class _Pending(NamedTuple):
    """Copies on their way to the host, and what the planner expects in them."""

    copied: Any  # event
    expected: list[tuple[str, Any, Any, str]]  # field, planned array, pinned tensor, rule


class Comparison:
    """Compares one builder's plans with what vLLM made.

    Scalars, lists and shapes are compared in every build. Contents of tensors on the CPU too; those on a GPU in one
    build of `SAMPLE_EVERY`, asynchronously: copied into pinned memory, read once the copy's event has completed.
    Rules: "equal" (the default); "prefix", vLLM's buffer is longer than what kernels read of it; "at_most", a bound.
    """

    def __init__(self, adapter: Adapter, tally: Tally) -> None:
        self._adapter = adapter
        self._tally = tally
        self._builds = 0
        self._pending: _Pending | None = None

    def compare(self, plan: MetadataPlan, metadata: Any) -> None:
        """Compare one build, and settle an earlier one whose copies have arrived."""
        self._settle()
        self._tally.compared += 1
        sample = self._builds % SAMPLE_EVERY == 0 and self._pending is None
        self._builds += 1
        later: list[tuple[str, Any, Any, str]] = []
        for name, planned in plan.fields.items():
            real = self._adapter.read(metadata, name)
            if real is NotImplemented:
                continue
            rule = self._adapter.rules.get(name, "equal")
            if isinstance(planned.value, list) and _is_tensor(real) and real.device.type == "cpu":
                real = real.tolist()  # 0.26 keeps some counts as tensors on the host
            if _is_tensor(real):
                self._tensor(name, planned, real, rule, later if sample else None)
            elif planned.source == "host" and not _agree(planned.value, real, rule):
                self._differs(name, planned.value, real)
            elif planned.source == "persistent" and real is None:
                self._differs(name, "a buffer", None)
        for name in plan.skipped:
            real = self._adapter.read(metadata, name)
            if real is not None and real is not NotImplemented:
                self._tally.unread += 1
                self._tally.unread_names[f"{plan.backend}: {name}"] += 1
        if later:
            self._begin(later)

    def _tensor(self, name: str, planned: FieldPlan, real: Any, rule: str, later: list[Any] | None) -> None:
        shape = tuple(planned.shape)
        fits = len(shape) == real.dim() and all(
            ours is None or (ours == theirs if rule == "equal" and planned.source != "persistent" else ours <= theirs)
            for ours, theirs in zip(shape, real.shape, strict=True)
        )
        if not fits:
            self._differs(name, f"shape {list(shape)}", f"shape {list(real.shape)}")
        elif isinstance(planned.value, np.ndarray):
            if real.device.type == "cpu":
                if not _agree(planned.value, real.numpy(), rule):
                    self._differs(name, planned.value, real.numpy())
            elif later is not None:
                later.append((name, planned.value, real, rule))

    def _begin(self, fields: list[tuple[str, Any, Any, str]]) -> None:
        import torch

        expected = []
        for name, planned, real, rule in fields:
            there = real.flatten()[: planned.size] if rule == "prefix" else real.flatten()
            here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
            here.copy_(there, non_blocking=True)
            expected.append((name, planned, here, rule))
        copied = torch.cuda.Event()
        copied.record()
        self._pending = _Pending(copied, expected)

    def _settle(self) -> None:
        pending = self._pending
        if pending is None or not pending.copied.query():
            return
        self._pending = None
        for name, planned, here, rule in pending.expected:
            if not _agree(planned.reshape(-1), here.numpy(), rule):
                self._differs(name, planned, here.numpy())

    def _differs(self, name: str, planned: Any, real: Any) -> None:
        self._tally.mismatch(f"{self._adapter.backend.name}: {name}: planned {_short(planned)}, vLLM {_short(real)}")


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dim") and hasattr(value, "device")


def _agree(planned: Any, real: Any, rule: str) -> bool:
    if rule == "at_most":
        # 0 and 1 bound nothing: vLLM's minimum over rows that include empty ones.
        return real is not None and (bool(planned <= real) or real <= 1)
    if isinstance(planned, np.ndarray):
        if isinstance(real, np.ndarray):
            real = real.reshape(-1)[: planned.size].reshape(planned.shape) if rule == "prefix" else real
            return bool(np.array_equal(planned, real))
        return False
    return bool(planned == real)


def _short(value: Any) -> str:
    text = np.array2string(value, threshold=12) if isinstance(value, np.ndarray) else str(value)
    return " ".join(text.split())[:120]
