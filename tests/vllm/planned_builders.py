"""vLLM's real AITER builders beside their planned subclasses, on one device, and what differs in what they make."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import fa_builder
import mla_builder
import torch
import triton_mla_builder
from syncfree.backends.vllm.planned.builder import Attached, planned_class
from syncfree.backends.vllm.planned.fa import FlashAttention
from syncfree.backends.vllm.planned.mla import LatentAttention
from syncfree.backends.vllm.planned.tally import Tally
from syncfree.backends.vllm.planned.triton_mla import TritonLatentAttention

WORK = ("work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
PREFILL_WORK = ("work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
DOUBLES = Path(__file__).resolve().parents[1] / "doubles"


def _double():
    """The aiter double, imported once and left out of `sys.modules` until a test asks for it."""
    sys.path.insert(0, str(DOUBLES))
    try:
        return importlib.import_module("aiter")
    finally:
        sys.path.remove(str(DOUBLES))
        sys.modules.pop("aiter", None)


AITER = _double()


def put_in_aiter(monkeypatch, gfx="gfx950", num_cu=256):
    """The aiter double, as an installed package would be."""
    monkeypatch.setitem(sys.modules, "aiter", AITER)
    AITER.configure(gfx, num_cu)
    AITER.CALLS.clear()
    return AITER


def tally_of(mode):
    tally = Tally()
    tally.clear(mode)
    return tally


def _settled(builder, environment, synchronous):
    config = getattr(builder, "vllm_config", None) or SimpleNamespace()
    config.scheduler_config = SimpleNamespace(async_scheduling=not synchronous)
    builder.vllm_config = config
    return builder


def fa(limits, environment, threshold, *, synchronous=True):
    """A builder as vLLM's `__init__` leaves it."""
    return _settled(fa_builder.make_builder(limits, environment, threshold), environment, synchronous)


def mla(limits, environment, threshold, *, synchronous=True, rows=mla_builder.MOST_ROWS):
    """A builder as vLLM's `__init__` leaves it, for so many rows."""
    import aiter

    builder = _settled(mla_builder.make_builder(limits, environment, threshold, rows), environment, synchronous)
    for name in ("_mla_q_dtype", "_mla_kv_dtype"):
        setattr(builder, name, getattr(aiter.dtypes, getattr(builder, name)))
    sizes = aiter.get_mla_metadata_info_v1(
        rows,
        threshold,
        builder._num_attention_heads,
        builder._mla_q_dtype,
        builder._mla_kv_dtype,
        False,
    )
    for name, (size, dtype) in zip(WORK, sizes, strict=True):
        setattr(builder, f"_mla_{name}", torch.zeros(size, dtype=dtype))
    return builder


ADAPTERS = {fa: FlashAttention, mla: LatentAttention, triton_mla_builder.make_builder: TritonLatentAttention}


def planned(make, limits, environment, threshold, tally, **settings):
    """The same builder as an object of the planned subclass, attached."""
    builder = make(limits, environment, threshold, **settings)
    return adopt(builder, ADAPTERS[make](), limits, environment, tally)


def adopt(builder, adapter, limits, environment, tally):
    """This builder's attributes, as an object of the planned subclass."""
    ours = object.__new__(planned_class(type(builder), adapter, tally))
    vars(ours).update(vars(builder))
    ours._attached = Attached(adapter, ours, environment, limits, tally)
    return ours


def move(builder, device):
    """Everything a builder keeps on its device, and nothing that it keeps pinned on the host."""
    for name, value in list(vars(builder).items()):
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            shared = value.dim() > 0 and not value.is_contiguous()  # an expanded workspace keeps its one element
            setattr(
                builder,
                name,
                value[..., :1].flatten()[:1].to(device).expand(value.shape) if shared else value.to(device),
            )
    builder.device = device
    return builder


def values(tensor):
    """Contents wherever it lies, without a counted wait on the simulated device."""
    return getattr(tensor, "_host", tensor).cpu()


def differences(adapter, plan, theirs, ours):
    """Planned fields in which two metadata objects differ: [(name, theirs, ours)]."""
    wrong = []
    for name, field in plan.fields.items():
        a, b = adapter.read(theirs, name), adapter.read(ours, name)
        if a is NotImplemented:
            continue
        rule = adapter.rules.get(name, "equal")
        if not _same(a, b, rule, field):
            wrong.append((name, a, b))
    for name in ("num_actual_tokens", "num_decodes", "num_decode_tokens", "num_prefills", "num_extends"):
        if getattr(theirs, name, None) != getattr(ours, name, None):
            wrong.append((name, getattr(theirs, name), getattr(ours, name)))
    return wrong


def _same(a, b, rule, field):
    if rule == "at_most":
        return b <= a or a in (0, 1)
    if isinstance(b, list) and isinstance(a, torch.Tensor):
        a = values(a).tolist()
    if not isinstance(a, torch.Tensor):
        return a == b
    if not isinstance(b, torch.Tensor) or b.dim() != a.dim():
        return False
    if a.device.type == "meta" or field.dtype not in ("int32", "int64"):
        return a.shape == b.shape
    a, b = values(a), values(b)
    if rule == "prefix":
        a, b = a.flatten()[: b.numel()], b.flatten()
    return torch.equal(a, b.to(a.dtype))  # vLLM keeps some maps in int64, its kernels read either
