"""Two collectors side by side."""

from syncfree.profiler.aggregate import Evidence
from syncfree.profiler.apis import lookup
from syncfree.profiler.calls import Call, Direction
from syncfree.profiler.collectors.base import Counters
from syncfree.profiler.recording import Recording
from syncfree.profiler.report import Compared, Comparison, Note, Report, Source, Step
from syncfree.profiler.verify import SHOWN, compare, outcome
from syncfree.profiler.windows import StepWindow


def steps(count):
    return [StepWindow(start_ns=100 * k, end_ns=100 * k + 90, index=k, batch_class="decode") for k in range(count)]


def calls(count, launches=2):
    made = []
    for k in range(count):
        names = ["cudaLaunchKernel"] * launches + ["cudaMemcpyAsync", "cudaStreamSynchronize"]
        for i, name in enumerate(names):
            api = lookup(name)
            direction = Direction.D2H if name == "cudaMemcpyAsync" else None
            made.append(Call(api=name, role=api.role, wait=api.wait, direction=direction, ts_ns=100 * k + i, dur_ns=1))
    return made


def counting(windows, launches=2):
    """A counter collector's evidence: marks in the windows."""
    total = Counters()
    for window in windows:
        after = total + Counters(kernels=launches, copies_d2h=1, d2h=1)
        window.marks["probe"] = (total, after)
        total = after
    return Evidence(name="probe", marks=True, totals=total)


def test_agreement_is_said_once():
    windows = steps(3)
    evidence = [counting(windows), Evidence(name="kineto", calls=calls(3))]
    _, (note,) = compare(windows, evidence)
    assert (note.kind, note.text.split(":")[0]) == ("verify", "probe and kineto agree on all 3 steps")
    assert "syncs, d2h copies" in note.text


def test_a_difference_names_step_figure_and_both_values():
    windows = steps(2)
    evidence = [counting(windows, launches=3), Evidence(name="kineto", calls=calls(2))]
    texts = [note.text for note in compare(windows, evidence)[1]]
    assert texts == [f"step {k} (decode): kernel launches: probe 3, kineto 2" for k in (0, 1)]


def test_every_figure_is_told_by_batch_class_too():
    windows = steps(5)
    windows[1].batch_class = windows[2].batch_class = "extend"
    made, _ = compare(windows, [counting(windows, launches=3), Evidence(name="kineto", calls=calls(5))])
    classes = {
        name: {f.name: (f.steps, f.left, f.right, f.differ) for f in told} for name, told in made[0].classes.items()
    }
    assert {name: told["kernel launches"] for name, told in classes.items()} == {
        "decode": (3, 9, 6, 3),
        "extend": (2, 6, 4, 2),
    }
    assert classes["extend"]["syncs"] == (2, 2, 2, 0)
    for figure in made[0].figures:
        told = [of_class[figure.name] for of_class in classes.values()]
        assert tuple(map(sum, zip(*told, strict=True))) == (figure.steps, figure.left, figure.right, figure.differ)


def test_many_differences_are_summed_up():
    windows = steps(20)
    evidence = [counting(windows, launches=3), Evidence(name="kineto", calls=calls(20))]
    _, notes = compare(windows, evidence)
    assert len(notes) == SHOWN + 1
    assert notes[-1].text == f"probe and kineto differ in {20 - SHOWN} more figures"


def test_a_figure_that_one_does_not_know_is_left_out():
    windows = steps(1)
    blind = Evidence(name="gpu_trace", sees=frozenset({"syncs"}), calls=calls(1))
    _, (note,) = compare(windows, [counting(windows, launches=9), blind])
    assert note.text == "probe and gpu_trace agree on all 1 steps: syncs"


def test_one_collector_is_not_compared_and_a_recording_tells_of_two():
    windows = steps(1)
    probe = counting(windows)
    assert compare(windows, [probe]) == ([], [])
    report = Recording(steps=windows, evidence=[probe, Evidence(name="kineto", calls=calls(1))]).build()
    assert [note.kind for note in report.notes] == ["verify"]
    assert [(item.left, item.right, item.differ) for item in report.verification] == [("probe", "kineto", 0)]


def compared(rank=0, differ=0, **about):
    figures = [Compared(name="syncs", steps=5, differ=differ, left=5, right=5 - differ)]
    return Comparison(left="probe", right="kineto", rank=rank, figures=figures, **about)


def report_of(*comparisons, ranks=1, notes=()):
    steps = [Step(rank=rank, index=k) for rank in range(ranks) for k in range(5)]
    source = Source(ranks=list(range(ranks)), collectors=["probe", "kineto"])
    return Report(source=source, steps=steps, verification=list(comparisons), notes=list(notes))


def test_what_a_comparison_proves():
    assert outcome(report_of(compared())) == (0, "probe and kineto agree on all 5 steps")
    assert outcome(report_of(compared(differ=2))) == (1, "probe and kineto differ: syncs (5 steps compared)")
    doubted = outcome(report_of(compared(differ=2, doubt="probe: its helper process died")))
    assert (doubted.exit_code, "its helper process died" in doubted.text) == (4, True)
    assert outcome(report_of(compared(doubt="probe: its helper process died"))).exit_code == 0
    blind = Note(kind="collector", text="torch.profiler delivered no runtime calls")
    assert outcome(report_of(notes=[blind])) == (4, f"probe and kineto could not be compared: {blind.text}")
    assert outcome(report_of(Comparison(left="probe", right="kineto"))).exit_code == 4
    assert outcome(report_of(Comparison(left="probe", right="gpu_trace", figures=compared().figures))).exit_code == 4


def test_every_rank_has_to_be_compared_and_a_difference_outweighs_the_rest():
    assert outcome(report_of(compared(0), compared(1), ranks=2)).exit_code == 0
    lacking = outcome(report_of(compared(0), ranks=2))
    assert (lacking.exit_code, "rank 1" in lacking.text) == (4, True)
    differ = outcome(report_of(compared(1, differ=1), ranks=3))
    assert differ == (1, "probe and kineto differ on rank 1: syncs (5 steps compared)")
