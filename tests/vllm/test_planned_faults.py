"""Whatever goes wrong in the planner, vLLM's own builder serves the step and one line is logged."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from syncfree.backends.vllm.planned import adapter as adapters
from syncfree.backends.vllm.planned.batches import BATCHES
from syncfree.backends.vllm.planned.builder import planned_class
from syncfree.planner import Batch, Environment, Limits
from syncfree.profiler import simulated_device

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent))
import planned_builders as builders  # noqa: E402
import planned_simulated as simulated  # noqa: E402

pytestmark = pytest.mark.vllm

FA = Limits(max_num_seqs=256, num_kv_heads=2)
MLA = Limits(max_num_seqs=256, max_num_batched_tokens=4096, workspace_tokens=2048)
MAKERS = {
    "fa": (builders.fa, FA),
    "mla": (builders.mla, MLA),
    "triton_mla": (builders.triton_mla_builder.make_builder, MLA),
}
MIXED = ([1, 1, 16, 20, 64], [50, 60, 90, 2000, 64])


@pytest.fixture(autouse=True)
def nothing_remembered():
    BATCHES._kept.clear()


@pytest.fixture(params=MAKERS)
def case(request, monkeypatch):
    """(vLLM's builder, the planned one, its tally, metadata) on the simulated device."""
    make, limits = MAKERS[request.param]
    with simulated_device() as device:
        simulated.install(monkeypatch, Environment())
        tally = builders.tally_of("on")
        theirs = simulated.builder(make, limits, Environment(), 1, device)
        ours = simulated.builder(make, limits, Environment(), 1, device)
        ours = builders.adopt(ours, builders.ADAPTERS[make](), limits, Environment(), tally)
        yield SimpleNamespace(theirs=theirs, ours=ours, tally=tally, device=device)


def common_of(case, query_lens, seq_lens, **about):
    about = {"is_prefilling": [q > 1 for q in query_lens]} | about
    return simulated.metadata(Batch.from_lengths(query_lens, seq_lens, **about), case.device)


def served_by_vllm(case, common, caplog, said):
    """Two builds equal vLLM's own; one line was logged."""
    caplog.set_level(logging.WARNING, "syncfree")
    for _ in range(2):
        ours, theirs = case.ours.build(0, common), case.theirs.build(0, common)
        assert type(ours) is type(theirs)
        assert equal(theirs, ours) == []
    lines = [record.getMessage() for record in caplog.records if record.name == "syncfree"]
    assert len(lines) == 1, lines
    assert said in lines[0]
    assert case.tally.planned == 0
    assert sum(case.tally.fallbacks.values()) in (1, 2)


def equal(theirs, ours, path=""):
    """Attributes, all the way down, in which two metadata objects differ."""
    if isinstance(theirs, torch.Tensor):
        same = isinstance(ours, torch.Tensor) and torch.equal(builders.values(theirs), builders.values(ours))
        return [] if same or "workspace" in path or "fp8_prefill" in path else [path]
    if isinstance(theirs, list) and theirs and hasattr(theirs[0], "__dict__"):
        return [d for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) for d in equal(a, b, f"{path}[{i}]")]
    if hasattr(theirs, "__dataclass_fields__"):
        names = theirs.__dataclass_fields__
        return [d for name in names for d in equal(getattr(theirs, name), getattr(ours, name), f"{path}.{name}")]
    if hasattr(theirs, "__dict__") and not isinstance(theirs, type):
        return []
    return [] if theirs == ours else [path]


def test_without_a_fault_the_planner_serves(case):
    common = common_of(case, *MIXED)
    case.ours.build(0, common)
    assert (case.tally.planned, dict(case.tally.fallbacks)) == (1, {})


def test_an_exception_in_planning(case, caplog, monkeypatch):
    monkeypatch.setattr(case.ours._attached.planner, "plan", lambda batch: 1 / 0)
    served_by_vllm(case, common_of(case, *MIXED), caplog, "ZeroDivisionError: division by zero")


def test_an_exception_half_way_through_materialising(case, caplog, monkeypatch):
    upload = case.ours._attached.staging.upload

    def failing(arrays):
        upload(arrays)
        raise RuntimeError("HIP error: out of memory")

    monkeypatch.setattr(case.ours._attached.staging, "upload", failing)
    served_by_vllm(case, common_of(case, *MIXED), caplog, "RuntimeError: HIP error: out of memory")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("query_start_loc_cpu", torch.tensor([0, 1], dtype=torch.int32), "query_start_loc_cpu: expected at least 6"),
        ("seq_lens_cpu_upper_bound", torch.zeros(1, 5, dtype=torch.int32), "expected at least 5 elements"),
        ("seq_lens_cpu_upper_bound", torch.tensor([50, 60, 90, 2000, 3], dtype=torch.int32), "got 3 for a query of 64"),
    ],
)
def test_metadata_of_a_wrong_shape_is_refused_before_anything_is_built(case, caplog, name, value, said):
    common = common_of(case, *MIXED)
    setattr(common, name, value)
    caplog.set_level(logging.WARNING, "syncfree")
    for _ in range(3):
        assert case.ours._planned(common) is None
    assert said in caplog.text
    assert len(caplog.records) == 1
    assert sum(case.tally.fallbacks.values()) == 3


def test_no_lengths_on_the_host(case, caplog):
    common = common_of(case, *MIXED)
    common.seq_lens_cpu_upper_bound = None
    caplog.set_level(logging.WARNING, "syncfree")
    for _ in range(3):
        assert case.ours._planned(common) is None
    assert "seq_lens_cpu_upper_bound: expected a tensor on the host, got None" in caplog.text
    assert len(caplog.records) == 1


def test_an_inexact_row_that_needs_an_exact_length(case, caplog):
    case.ours._attached._drafts = 3
    case.ours.reorder_batch_threshold = case.theirs.reorder_batch_threshold = 4
    query, seq = ([4, 4, 9], [90, 70, 60])
    common = common_of(case, query, seq, decode_threshold=4, is_prefilling=[False] * 3)
    served_by_vllm(case, common, caplog, "InexactBatch: seq_lens[2]: expected an exact length")


def test_an_order_that_would_be_mis_served(monkeypatch, caplog):
    with simulated_device() as device:
        simulated.install(monkeypatch, Environment())
        tally = builders.tally_of("on")
        ours = simulated.builder(builders.fa, FA, Environment(), 1, device)
        ours = builders.adopt(ours, builders.ADAPTERS[builders.fa](), FA, Environment(), tally)
        theirs = simulated.builder(builders.fa, FA, Environment(), 1, device)
        case = SimpleNamespace(theirs=theirs, ours=ours, tally=tally, device=device)
        served_by_vllm(case, common_of(case, [1, 10, 9], [70, 10, 50]), caplog, "UnorderedBatch")


@pytest.mark.parametrize("version", ["0.33.0", "0.31.2", "dev"])
def test_an_unknown_vllm(version, case, caplog, monkeypatch):
    case.ours._attached = None
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    served_by_vllm(
        case,
        common_of(case, *MIXED),
        caplog,
        f"left to vLLM: {case.ours.adapter.backend.upstream}: BadInput: vllm: expected",
    )
    assert case.ours._attached is False


def test_no_aiter(case, caplog, monkeypatch):
    """Of these rows vLLM's own builders ask aiter nothing. TRITON_MLA never does."""
    needs = case.ours.adapter.needs_aiter
    case.ours._attached = None
    common = common_of(case, [16, 20], [66, 90])
    monkeypatch.setattr(adapters.sys, "modules", {k: v for k, v in sys.modules.items() if k != "aiter"})
    monkeypatch.setattr(adapters.importlib.util, "find_spec", lambda name: None)
    if not needs:
        assert case.ours.build(0, common)
        assert (case.tally.planned, caplog.records) == (1, [])
        return
    served_by_vllm(case, common, caplog, "aiter: expected it installed beside vLLM, found none")
    assert case.ours._attached is False


def test_an_aiter_with_another_signature(case, caplog, monkeypatch):
    if not isinstance(case.ours.adapter, builders.LatentAttention):
        pytest.skip("only ROCM_AITER_MLA calls aiter's scheduler")
    case.ours._attached = None
    monkeypatch.setattr(builders.AITER, "get_mla_metadata_v1", lambda seqlens_qo_indptr, seqlens_kv_indptr: None)
    case.ours.adapter.settings = lambda builder: (Environment(), MLA)
    served_by_vllm(case, common_of(case, [16, 20], [66, 90]), caplog, "get_mla_metadata_v1 with page_size")


def test_shadow_survives_its_own_faults(case, caplog, monkeypatch):
    case.tally.clear("shadow")
    monkeypatch.setattr(case.ours._attached.comparison, "compare", lambda plan, metadata: 1 / 0)
    served_by_vllm(case, common_of(case, *MIXED), caplog, "ZeroDivisionError")


def test_off_and_fast_builds_never_ask_the_planner(case, monkeypatch):
    monkeypatch.setattr(type(case.ours), "_planned", lambda self, common: pytest.fail("planned"))
    common = common_of(case, *MIXED)
    case.ours.build(0, common, fast_build=True)
    case.tally.clear("off")
    case.ours.build(0, common)


def test_drafting_and_capture_are_vllms_own(case):
    common = common_of(case, [1, 1, 1], [9, 70, 500])
    for theirs, ours in (
        (case.theirs.build_for_drafting(common, 0), case.ours.build_for_drafting(common, 0)),
        (case.theirs.build_for_cudagraph_capture(common), case.ours.build_for_cudagraph_capture(common)),
    ):
        assert equal(theirs, ours) == []
    assert case.tally.planned == 0
    case.ours.build(0, common)
    assert case.tally.planned == 1


def test_update_block_table_takes_planned_metadata():
    """A builder of vLLM's that supports it gets metadata of its own class, whoever built it."""

    class Metadata(SimpleNamespace):
        pass

    class Upstream:
        device = torch.device("cpu")
        reorder_batch_threshold = 1

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            return Metadata(by="vllm", block_table=common_attn_metadata.block_table_tensor)

        def update_block_table(self, metadata, blk_table, slot_mapping):
            return Metadata(by=metadata.by, block_table=blk_table, slot_mapping=slot_mapping)

    class Adapter(builders.FlashAttention):
        needs_aiter = False

        def settings(self, builder):
            return Environment(), FA

        def materialise(self, builder, plan, batch, common, staging, environment):
            return Metadata(by="planner", block_table=common.block_table_tensor)

    tally = builders.tally_of("on")
    builder = planned_class(Upstream, Adapter(), tally)()
    common = simulated.metadata(Batch.from_lengths([1], [9], is_prefilling=[False]), torch.device("cpu"))
    made = builder.update_block_table(builder.build(0, common), "table", "slots")
    assert vars(made) == {"by": "planner", "block_table": "table", "slot_mapping": "slots"}
    assert tally.planned == 1
