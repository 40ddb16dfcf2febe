"""Joining ranks, on recordings made by hand."""

import pytest
from syncfree.profiler.aggregate import Evidence
from syncfree.profiler.calls import Call, Frame, Role, Wait
from syncfree.profiler.ranks import join
from syncfree.profiler.recording import Recording
from syncfree.profiler.report import Note, Source
from syncfree.profiler.windows import PhaseWindow, StepWindow

MS = 1_000_000
SIZES = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def recording(rank=0, sizes=SIZES, first_index=0, begin_ns=0, build_ms=1.0, step_ms=5.0, syncs=0):
    steps, calls = [], []
    for i, size in enumerate(sizes):
        start = begin_ns + i * 10 * MS
        build = PhaseWindow(name="build", start_ns=start, end_ns=start + int(build_ms * MS), thread=1)
        step = StepWindow(start_ns=start, end_ns=start + int(step_ms * MS), thread=1, rank=rank, index=first_index + i)
        step.batch_class, step.num_reqs, step.num_tokens, step.phases = "decode", size, size, [build]
        steps.append(step)
        for k in range(syncs):
            stack = (Frame("/model.py", 7, "forward", "x.item()"),)
            calls.append(
                Call(
                    api="cuStreamSynchronize",
                    role=Role.SYNC,
                    wait=Wait.STREAM,
                    ts_ns=start + 10 + k,
                    dur_ns=5,
                    thread=1,
                    stack=stack,
                )
            )
    evidence = [Evidence(name="probe", sees=frozenset({"syncs", "blocked"}), calls=calls)]
    return Recording(source=Source(ranks=[rank], device="gpu"), steps=steps, evidence=evidence, threads={1: "main"})


def stragglers(report):
    return [note.text for note in report.notes if note.kind == "straggler"]


def test_one_rank_is_its_own_report():
    report = join([recording(rank=4)])
    assert report.source.ranks == [4]
    assert len(report.steps) == len(SIZES)


def test_figures_of_all_ranks_are_in_the_classes_sites_and_totals():
    report = join([recording(rank=rank, syncs=rank + 1) for rank in range(3)])
    assert report.source.ranks == [0, 1, 2]
    assert report.classes["decode"].steps == 3 * len(SIZES)
    assert report.classes["decode"].syncs_per_step.max == 3
    assert report.totals.syncs.total == (1 + 2 + 3) * len(SIZES)
    (site,) = report.sites
    assert (site.file, site.line, site.count) == ("/model.py", 7, 6 * len(SIZES))


@pytest.mark.parametrize("late", [0, 1, 5])
@pytest.mark.parametrize("which", [0, 1])
def test_ranks_of_one_engine_get_the_same_index_for_the_same_step(late, which):
    pair = [recording(rank=0), recording(rank=1)]
    pair[which] = recording(rank=which, sizes=SIZES[late:], begin_ns=late * 10 * MS)
    report = join(pair)
    by_index = {}
    for step in report.steps:
        by_index.setdefault(step.index, {})[step.rank] = step
    shared = [ranks for ranks in by_index.values() if len(ranks) == 2]
    assert len(shared) == len(SIZES) - late
    assert all(ranks[0].num_tokens == ranks[1].num_tokens for ranks in shared)
    assert min(step.index for step in report.steps) >= 0


def test_a_run_of_equal_decodes_is_aligned_by_time():
    same = [8] * 30
    report = join([recording(rank=0, sizes=same), recording(rank=1, sizes=same[3:], begin_ns=3 * 10 * MS)])
    starts = {(step.rank, step.index): step.start_us for step in report.steps}
    assert all(starts[0, i] == starts[1, i] for i in range(3, 30))


def test_engines_that_ran_different_batches_are_not_compared():
    other = [size + 1 for size in reversed(SIZES)]
    report = join([recording(rank=0), recording(rank=1, sizes=other, build_ms=4.0)])
    assert stragglers(report) == []
    assert [step.index for step in report.steps if step.rank == 1] == list(range(len(SIZES)))


def test_a_rank_whose_build_takes_longer_is_named():
    report = join([recording(rank=rank, build_ms=3.0 if rank == 2 else 1.0) for rank in range(4)])
    assert stragglers(report) == [
        "rank 2 is a straggler: its build takes 3.00 ms, the other ranks' 1.00 ms (medians over 20 common steps)"
    ]


def test_a_rank_whose_steps_take_longer_is_named():
    report = join([recording(rank=0), recording(rank=1, step_ms=9.0)])
    (text,) = stragglers(report)
    assert text.startswith("rank 1 is a straggler: its step takes 9.00 ms, the other ranks' 5.00 ms")


@pytest.mark.parametrize("build_ms", [1.0, 1.2, 1.09])
def test_ranks_that_are_about_as_fast_are_not(build_ms):
    assert stragglers(join([recording(rank=0), recording(rank=1, build_ms=build_ms)])) == []


def test_a_rank_that_is_slower_in_some_steps_and_faster_in_others_is_not():
    slow, fast = recording(rank=0), recording(rank=1)
    for i, step in enumerate(slow.steps):
        step.end_ns += (20 if i % 5 < 3 else -4) * MS
    assert stragglers(join([slow, fast])) == []


def test_a_ratio_alone_makes_no_straggler_where_the_times_are_tiny():
    assert stragglers(join([recording(rank=0, build_ms=0.01), recording(rank=1, build_ms=0.05)])) == []


def test_a_partial_rank_makes_the_whole_partial_and_its_note_stays():
    partial = recording(rank=1)
    partial.source.partial = True
    partial.notes = [Note(kind="partial", text="cut off")]
    report = join([recording(rank=0), partial])
    assert report.source.partial
    assert [note.text for note in report.notes] == ["cut off"]


def test_what_every_rank_says_is_said_once():
    ranks = [recording(rank=rank) for rank in range(3)]
    for item in ranks:
        item.notes = [Note(kind="device", text="the same")]
    assert [note.text for note in join(ranks).notes] == ["the same"]


def test_ranks_without_steps_do_not_hide_the_others():
    report = join([recording(rank=0), recording(rank=1, sizes=[])])
    assert len(report.steps) == len(SIZES)
    assert report.source.ranks == [0, 1]
