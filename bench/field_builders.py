"""vLLM's metadata builders of the three field cases: before, after (upstream's own released files) and ours.

Needs vLLM 0.26: upstream's files of other releases are put into it one at a time, as the field did when it mended them.
They are taken from the released wheels (`tests/vllm/released.py`), never kept in the repository. `pack` collects them
for a machine without a network; `SYNCFREE_RELEASED` names the folder there.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "vllm"))

MLA_FILE = "vllm/v1/attention/backends/mla/rocm_aiter_mla.py"
FA_FILE = "vllm/v1/attention/backends/rocm_aiter_fa.py"
PACKED = (
    ("0.18.1", MLA_FILE),
    ("0.20.2", MLA_FILE),
    ("0.27.1", MLA_FILE),
    ("0.28.0", MLA_FILE),
    ("0.20.2", FA_FILE),
    ("0.22.1", FA_FILE),
)
GUARD = "            and attn_metadata.prefill.chunked_context is None\n"  # of 0.28.0's `build`
NUM_CU = 256  # of the card that schedules are made for; nothing of this runs on it
CASES = {
    "case1": {
        "before": "0.27.1: FP8 prefill metadata on chunked prefill too",
        "after": "0.28.0: guarded",
        "after, guard off": "0.28.0 with its guard taken out, the mend isolated",
        "ours": "planned, in 0.26's builder",
    },
    "case2": {
        "before": "0.20.2: seq_lens copied to the host on every batch",
        "after": "0.22.1: not on pure decode",
        "ours": "planned, in 0.26's builder",
    },
    "case3": {
        "before": "0.18.1: no persistent decode",
        "after": "0.20.2: the six work buffers on every decode",
        "ours": "planned, in 0.26's builder, which fills them itself whatever the route",
    },
}


def released() -> Any:
    """`tests/vllm/released.py`, reading from the packed folder where there is one."""
    import released as module

    packed = os.environ.get("SYNCFREE_RELEASED")
    if packed:
        module.CACHE = Path(packed).resolve()
    return module


def pack(folder: Path) -> None:
    """Copy the upstream files that the cases swap in to `folder`, as `<release>/<file>`. Needs a package index."""
    for version, name in PACKED:
        source = released().released_file(version, name)
        target = folder / version / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        print(target)


class Patches:
    """What pytest's monkeypatch does, for good: this process ends with the measurement."""

    def setattr(self, target: Any, name: str, value: Any, raising: bool = True) -> None:
        if raising:
            getattr(target, name)
        setattr(target, name, value)

    def setitem(self, mapping: Any, name: str, value: Any) -> None:
        mapping[name] = value


class Setting(NamedTuple):
    """Sizes of an engine, and whether its device is simulated."""

    device: Any
    simulated: bool
    rows: int
    tokens: int  # of a batch
    room: int  # tokens of a request
    block: int
    drafts: int = 0


def install(simulated: bool) -> None:
    """Stand-ins for what only an AMD card has. On a real device page indices are expanded by vLLM's own kernel."""
    import planned_builders as builders
    import planned_simulated
    from syncfree.planner import Environment

    if simulated:
        planned_simulated.install(Patches(), Environment(vllm="0.26", num_cu=NUM_CU))
        return
    builders.put_in_aiter(Patches(), "gfx950", NUM_CU)
    _plan_prefills_once(builders.AITER.ps_metadata)
    import fa_builder

    Patches().setattr(fa_builder.upstream.rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: False)


def _plan_prefills_once(module: Any) -> None:
    """The stand-in's prefill planner remembers its results: aiter's own, in C++, takes next to no time for one prompt.

    So upstream's builders are timed for their copies and waits, not for our stand-in's NumPy.
    """
    plan, kept = module.schedules.ps_prefill, {}

    def remembered(*lengths: Any, **rule: Any) -> Any:
        key = (*(np.asarray(values).tobytes() for values in lengths), *rule.items())
        if key not in kept:
            kept[key] = plan(*lengths, **rule)
        return kept[key]

    module.schedules = SimpleNamespace(ps_prefill=remembered, ps_prefill_shapes=module.schedules.ps_prefill_shapes)


def make(case: str, variant: str, setting: Setting) -> Any:
    """The metadata builder of a variant. Raises OSError where upstream's file can be had neither here nor packed."""
    import planned_builders as builders
    from syncfree.planner import Environment, Limits

    sizes = {"max_num_seqs": setting.rows, "max_num_batched_tokens": setting.tokens, "block_size": setting.block}
    kind, dtype = (builders.fa, "bf16") if case == "case2" else (builders.mla, "fp8" if case == "case1" else "bf16")
    environment = Environment(vllm="0.26", num_cu=NUM_CU, kv_dtype=dtype)
    limits = Limits(num_kv_heads=8 if case == "case2" else 1, workspace_tokens=65536, **sizes)
    built = _placed(kind, limits, environment, setting)
    if variant == "ours":
        tally = builders.tally_of("on")
        planned = builders.adopt(built, builders.ADAPTERS[kind](), limits, environment, tally)
        planned.tally_of_this_run = tally
        return planned
    return _of_release(built, case, variant, setting)


def _placed(kind: Any, limits: Any, environment: Any, setting: Setting) -> Any:
    """vLLM 0.26's builder with everything it keeps on the device, sized for the engine."""
    import planned_simulated

    built = planned_simulated.builder(kind, limits, environment, 1 + setting.drafts, setting.device)
    built.vllm_config.scheduler_config.async_scheduling = bool(setting.drafts)
    if not hasattr(built, "paged_kv_indices"):
        return built
    pages = setting.rows * setting.room
    built.paged_kv_indices = torch.zeros(pages, dtype=torch.int32, device=setting.device)
    for name, (size, dtype) in _prefill_buffers(limits).items():
        setattr(built, name, torch.zeros(size, dtype=dtype, device=setting.device))
    return built


def _prefill_buffers(limits: Any) -> dict[str, Any]:
    """The FP8 prefill buffers as vLLM allocates them once: for as many rows and tokens as a batch may have."""
    import aiter

    sizes = aiter.get_ps_metadata_info_v1(
        batch_size=limits.max_num_seqs,
        num_head_k=limits.num_heads,
        max_qlen=limits.max_num_batched_tokens,
        qlen_granularity=256,
    )
    names = ("work_metadata", "work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
    return {f"fp8_ps_{name}": size for name, size in zip(names, sizes, strict=True)}


def _of_release(built: Any, case: str, variant: str, setting: Setting) -> Any:
    """The same builder as an object of another release's class."""
    version = CASES[case][variant].partition(":")[0].split()[0]
    file = released().released_file(version, FA_FILE if case == "case2" else MLA_FILE)
    module = _module(file, version, unguarded=variant.endswith("guard off"))
    if setting.simulated:
        _expand_without_triton(module)
    if hasattr(module, "_gluon_mla_decode_supported"):
        module._gluon_mla_decode_supported = lambda: True
    name = "AiterFlashAttentionMetadataBuilder" if case == "case2" else "AiterMLAMetadataBuilder"
    made = object.__new__(getattr(module, name))
    vars(made).update(vars(built))
    if case == "case2":
        made.total_tokens = 0
    else:
        made.metadata_cls = module.AiterMLAMetadata
    return made


def _module(file: Path, version: str, unguarded: bool) -> Any:
    """Upstream's file as a module; `unguarded` takes the one condition out of 0.28.0's `build`."""
    name = f"upstream_{file.stem}_{version.replace('.', '_')}{'_unguarded' if unguarded else ''}"
    if name in sys.modules:
        return sys.modules[name]
    if not unguarded:
        return released().module_from(file, name)
    text = file.read_text()
    if text.count(GUARD) != 1:
        raise SystemExit(f"{file}: expected the guard once, found it {text.count(GUARD)} times")
    module = type(sys)(name)
    module.__file__ = str(file)
    sys.modules[name] = module
    exec(compile(text.replace(GUARD, "\n"), str(file), "exec"), vars(module))
    return module


def _expand_without_triton(module: Any) -> None:
    import planned_simulated

    if hasattr(module, "_expand_page_indices_kernel"):
        module._expand_page_indices_kernel = planned_simulated.ExpandIndices()
    if hasattr(module, "_copy_page_indices_kernel"):
        module._copy_page_indices_kernel = _CopyIndices()


class _CopyIndices:
    """0.18.1's kernel, pages of one token: one launch, and the indices it would write."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        import planned_simulated

        run = planned_simulated.ExpandIndices()[grid]
        return lambda *args, BLOCK_SIZE: run(*args, KERNEL_BLOCK_SIZE=1)


# ----------------------------------------------------------------- metadata


def common_metadata(rows: Any, starts: np.ndarray, starts_d: Any, lens: Any, table: Any, places: Any) -> Any:
    """The `CommonAttentionMetadata` of a step, as a model runner on a GPU with asynchronous scheduling has it."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    upper = torch.tensor([row.computed + row.query for row in rows], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts_d,
        query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
        seq_lens=lens,
        num_reqs=len(rows),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(row.query for row in rows),
        max_seq_len=int(upper.max()),
        block_table_tensor=table,
        slot_mapping=places,
        is_prefilling=torch.tensor([not row.decode for row in rows]),
        seq_lens_cpu_upper_bound=upper,
    )


def reader_of(case: str, block: int) -> Any:
    """What the model reads of this case's metadata."""
    import serving

    def mla_decode(metadata: Any, inputs: Any) -> tuple[Any, Any, Any]:
        found = metadata.decode
        return found.qo_indptr[: inputs.decode_rows + 1], found.paged_kv_indptr, found.paged_kv_indices

    def mla_context(metadata: Any, inputs: Any) -> Any:
        found = None if metadata.prefill is None else metadata.prefill.chunked_context
        if found is None:
            return None
        chunks = SimpleNamespace(
            rows=found.token_to_seq, starts=found.starts, before=found.cu_seq_lens, totals=found.seq_tot
        )
        return _slots(chunks, metadata.prefill.block_table, block)

    def fa_decode(metadata: Any, inputs: Any) -> tuple[Any, Any, Any]:
        rows = inputs.decode_rows
        return token_pages(metadata.block_table[:rows], metadata.seq_lens[:rows], block)

    def fa_context(metadata: Any, inputs: Any) -> Any:
        if metadata.extend_metadata is None:
            return None
        found, rows = metadata.extend_metadata.chunk_context_metadata, inputs.decode_rows
        chunks = SimpleNamespace(
            rows=found.token_to_batch,
            starts=found.chunk_starts,
            before=found.cu_seq_lens_chunk,
            totals=found.total_token_per_batch,
        )
        return _slots(chunks, metadata.block_table[rows:], block)

    if case == "case2":
        return serving.Reader(fa_decode, fa_context)
    return serving.Reader(mla_decode, mla_context)


def _slots(chunks: Any, table: Any, block: int) -> Any:
    """Where the context of every row lies in the cache, row after row."""
    if len(chunks.totals) != 1:
        raise SystemExit(f"context: expected it to fit one round, got {len(chunks.totals)}")
    total = int(chunks.totals[0])
    row = chunks.rows[0, :total].to(torch.int64)
    here = torch.arange(total, device=table.device)
    position = chunks.starts[0].to(torch.int64)[row] + here - chunks.before[0].to(torch.int64)[row]
    return table[row, position // block].to(torch.int64) * block + position % block


def token_pages(table: Any, lens: Any, block: int) -> tuple[Any, Any, Any]:
    """(qo_indptr, kv_indptr, page_list) of one query token a row; the list is as long as the table allows."""
    rows, device = len(lens), table.device
    indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    torch.cumsum(lens, 0, dtype=torch.int32, out=indptr[1:])
    here = torch.arange(table.numel() * block, dtype=torch.int32, device=device)
    row = torch.searchsorted(indptr[1:], here, right=True).clamp_(max=rows - 1)
    position = (here - indptr[row]).clamp_(0, table.shape[1] * block - 1)
    pages = table[row, position // block] * block + position % block
    return torch.arange(rows + 1, dtype=torch.int32, device=device), indptr, pages.to(torch.int32)
