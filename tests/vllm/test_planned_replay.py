"""Captured graphs under `on`: a replay reads the same addresses, and there what vLLM alone would have put.

A graph keeps the addresses it was captured with. Here nothing is captured (there is no GPU): what a replay would read
is looked up at the addresses of `build_for_cudagraph_capture`, after every step, beside a builder of vLLM's own that
was handed the same steps. The planner fails at some of them, in several places, also half-way through the buffers.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from syncfree.backends.vllm.planned import mla_decode_build
from syncfree.backends.vllm.planned.batches import BATCHES
from syncfree.planner import Batch, Environment, Limits
from syncfree.profiler import simulated_device

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent))
import planned_builders as builders  # noqa: E402
import planned_simulated as simulated  # noqa: E402

pytestmark = pytest.mark.vllm

ROWS = 8  # of the captured graph


def latent(**sizes):
    return Limits(max_num_seqs=256, max_num_batched_tokens=4096, workspace_tokens=2048, **sizes)


BF16 = Environment(kv_dtype="bf16")
CASES = {
    "fa": (builders.fa, Limits(max_num_seqs=256, num_kv_heads=2), Environment(), 1),
    "fa, drafts": (builders.fa, Limits(max_num_seqs=256, num_kv_heads=2), Environment(), 3),
    "mla, fp8": (builders.mla, latent(), Environment(), 1),
    "mla, fp8, drafts": (builders.mla, latent(num_heads=128), Environment(), 3),
    "mla, bf16": (builders.mla, latent(num_heads=128), BF16, 1),
    "mla, split KV": (builders.mla, latent(), BF16, 1),
    "mla, gluon": (builders.mla, latent(num_heads=8), BF16, 1),
    "mla, gluon, drafts": (builders.mla, latent(num_heads=8), BF16, 3),
}


@pytest.fixture(params=CASES)
def case(request, monkeypatch):
    """vLLM's builder and the planned one on the simulated device, both captured."""
    make, limits, environment, length = CASES[request.param]
    BATCHES._kept.clear()
    with simulated_device() as device:
        simulated.install(monkeypatch, environment)
        tally = builders.tally_of("on")
        theirs = simulated.builder(make, limits, environment, length, device)
        ours = simulated.builder(make, limits, environment, length, device)
        ours = builders.adopt(ours, builders.ADAPTERS[make](), limits, environment, tally)
        made = SimpleNamespace(theirs=theirs, ours=ours, tally=tally, device=device, length=length, make=make)
        made.runner = Runner(device, length)
        made.captured = [b.build_for_cudagraph_capture(made.runner.step([1] * ROWS)) for b in (theirs, ours)]
        yield made


class Runner:
    """The engine's own tensors, which a graph reads too: they stay where they are, and every step writes them."""

    def __init__(self, device, length):
        self.length = length
        self._step = 0
        flags = [False] * ROWS
        batch = Batch.from_lengths([length] * ROWS, [1_000] * ROWS, is_prefilling=flags, decode_threshold=length)
        self._kept = simulated.metadata(batch, device)

    def step(self, contexts, extends=(), fresh=()):
        """Decodes with so much context, then rows of 20 tokens with context and rows without; a graph's padding."""
        self._step += 1
        mixed = bool(extends or fresh)
        padding = 0 if mixed else ROWS - len(contexts)
        query = [self.length] * len(contexts) + [20] * len(extends) + list(fresh) + [0] * padding
        seq = [self.length + c for c in contexts] + [20 + c for c in extends] + list(fresh) + [0] * padding
        flags = [False] * len(contexts) + [True] * (len(extends) + len(fresh)) + [False] * padding
        tokens = sum(query) if mixed else ROWS * self.length
        batch = Batch.from_lengths(query, seq, is_prefilling=flags, decode_threshold=self.length, num_tokens=tokens)
        common = simulated.metadata(batch, self._kept.seq_lens.device)
        if len(batch) == ROWS and not mixed:
            for name in ("seq_lens", "query_start_loc", "block_table_tensor"):
                kept = getattr(self._kept, name)
                kept.copy_(getattr(common, name))
                setattr(common, name, kept)
        return common


def steps(runner):
    """Decodes of a captured graph, full and padded, and between them steps that run without one."""
    yield runner.step([40 * (i + 1) for i in range(8)])
    yield runner.step([41 * (i + 1) for i in range(5)])
    yield runner.step([42 * (i + 1) for i in range(4)], extends=[300, 2_500], fresh=[64])
    yield runner.step([43 * (i + 1) for i in range(7)])
    yield runner.step([], extends=[70], fresh=[30, 12])
    yield runner.step([700])
    yield runner.step([44 * (i + 1) for i in range(8)])


STEPS = 7


def fail_in_planning(case, patches):
    patches.setattr(case.ours._attached.planner, "plan", lambda batch: 1 / 0)


def fail_in_upload(case, patches):
    upload = case.ours._attached.staging.upload

    def failing(arrays):
        upload(arrays)
        raise RuntimeError("HIP error: out of memory")

    patches.setattr(case.ours._attached.staging, "upload", failing)


def fail_behind_the_buffers(case, patches):
    """The indptrs are in vLLM's buffers, the schedule is half-written."""

    def failing(builder, *about):
        builder.paged_kv_indices.fill_(7)
        builder._mla_work_indptr.fill_(7)
        raise RuntimeError("launch failed")

    patches.setattr(mla_decode_build, "_schedule", failing)


def fail_at_the_end(case, patches):
    """Everything is written, the object is not handed over."""
    build = type(case.ours).adapter.materialise

    def failing(*about):
        build(*about)
        raise TypeError("an argument that this vLLM does not know")

    patches.setattr(type(case.ours).adapter, "materialise", failing)


FAULTS = {
    "planning": fail_in_planning,
    "upload": fail_in_upload,
    "schedule": fail_behind_the_buffers,
    "the end": fail_at_the_end,
}


def run(case, fault, failing):
    """Every step through both builders; what a replay would read is compared after each."""
    for number, common in enumerate(steps(case.runner)):
        with pytest.MonkeyPatch.context() as patches:
            if number in failing:
                fault(case, patches)
            theirs, ours = case.theirs.build(0, common), case.ours.build(0, common)
        assert read_by_replay(case.captured[1]) == read_by_replay(case.captured[0]), number
        assert whole_buffers(case.ours) == whole_buffers(case.theirs), number
        assert addresses(ours, case.captured[1]) == [], number
        assert [getattr(ours, name) for name in COUNTS] == [getattr(theirs, name) for name in COUNTS], number
        assert decode_of(ours) == decode_of(theirs), number


COUNTS = ("num_actual_tokens", "num_decodes", "num_decode_tokens", "num_prefills")
BUFFERS = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
ENGINES = ("seq_lens", "block_table", "query_start_loc")
FLAGS = ("max_qo_len", "use_gluon_decode", "use_gluon_verify", "has_persistent_metadata")


def decode_of(metadata):
    """What the decode kernels of this step are called with on the host."""
    decode = getattr(metadata, "decode", None)
    if decode is not None:
        return [getattr(decode, name) for name in FLAGS]
    decode = getattr(metadata, "decode_metadata", None)
    return None if decode is None else decode.max_query_len


def read_by_replay(metadata):
    """What a graph's kernels find at the addresses they were captured with."""
    if not hasattr(metadata, "decode"):  # FA: the engine's own tensors
        return [builders.values(getattr(metadata, name)).tolist() for name in ("seq_lens", "block_table")]
    read = [builders.values(getattr(metadata.decode, name)).tolist() for name in BUFFERS]
    read[2] = read[2][: read[1][-1]]  # behind them lies what no kernel reads
    work = [getattr(metadata, name) for name in builders.WORK[1:]] if metadata.decode.has_persistent_metadata else []
    return read + [builders.values(buffer).tolist() for buffer in work]


def whole_buffers(builder):
    """What graphs of other sizes read: the indptrs to their ends."""
    kept = [getattr(builder, name, None) for name in BUFFERS[:2]]
    return [builders.values(buffer).tolist() for buffer in kept if buffer is not None]


def addresses(served, captured):
    """Tensors of a served decode that do not begin where the graph was captured with them."""
    if served.num_prefills or getattr(served, "num_extends", 0):
        return []
    if not hasattr(served, "decode"):
        pairs = [(name, getattr(served, name), getattr(captured, name)) for name in ENGINES]
    else:
        pairs = [(name, getattr(served.decode, name), getattr(captured.decode, name)) for name in BUFFERS]
        if captured.decode.has_persistent_metadata:
            pairs += [(name, getattr(served, name), getattr(captured, name)) for name in builders.WORK]
    return [name for name, ours, theirs in pairs if ours.data_ptr() != theirs.data_ptr()]


def test_every_step_served_by_the_planner(case):
    run(case, None, ())
    assert (case.tally.planned, dict(case.tally.fallbacks)) == (STEPS, {})


@pytest.mark.parametrize("place", FAULTS)
@pytest.mark.parametrize("failing", [(0,), (1,), (2,), (3,), (1, 3), (6,), tuple(range(3, STEPS))])
def test_replays_are_vllms_when_the_planner_raises_at_step_k(case, place, failing):
    """At the step itself and at every later one, whether the planner comes back or not."""
    run(case, FAULTS[place], failing)
    reached = sum(case.tally.fallbacks.values())
    if place == "schedule":  # only steps with a schedule to make get there
        assert reached <= len(failing)
    else:
        assert reached == len(failing)
    assert case.tally.planned == STEPS - reached


def test_a_fault_behind_the_buffers_is_reached(case):
    """Else the half-written schedule above would prove nothing."""
    run(case, fail_behind_the_buffers, range(STEPS))
    scheduled = case.make is builders.mla and case.captured[1].decode.has_persistent_metadata
    assert (sum(case.tally.fallbacks.values()) > 0) == scheduled


def test_shadow_leaves_what_a_replay_reads_as_it_was(case):
    case.tally.clear("shadow")
    run(case, None, ())
    assert (case.tally.compared, case.tally.mismatches, dict(case.tally.fallbacks)) == (STEPS, 0, {})


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("mla")], indirect=True)
def test_an_indptr_that_is_wrong_behind_the_rows_would_be_seen(case, monkeypatch):
    """The comparison can fail: a graph of another size reads on to the end of the buffer."""
    padded = mla_decode_build._padded

    def wrong(values, size):
        out = padded(values, size)
        out[-1] += 1
        return out

    monkeypatch.setattr(mla_decode_build, "_padded", wrong)
    with pytest.raises(AssertionError):
        run(case, None, ())
