"""Comparing two reports."""

import random
from itertools import pairwise

import pytest
from syncfree.profiler.diff import CHANCE, compare, rank_test
from syncfree.profiler.renderers.console import console
from syncfree.profiler.renderers.diff import render_diff, render_markdown
from syncfree.profiler.report import (
    Copies,
    Launches,
    PhaseFigures,
    Report,
    Site,
    SiteStep,
    Source,
    Step,
    Syncs,
)


def step(index, batch_class="decode", d2h=0, kernels=10, duration=100.0, **about):
    return Step(
        index=index,
        batch_class=batch_class,
        syncs=Syncs(total=d2h, d2h=d2h, h2d=0, stream=0, device=0, event=0, memset=0, maybe=0),
        copies=Copies(d2h=d2h, h2d=0, d2d=0),
        launches=Launches(kernels=kernels, graphs=0, captured=0),
        blocked_us=0.0,
        duration_us=duration,
        phases={"build": PhaseFigures(duration_us=duration / 2)} if about.pop("build", False) else {},
        **about,
    )


def report(steps, sites=(), **about):
    return Report(steps=list(steps), sites=list(sites), source=Source(**about))


def site(line=7, function="forward", steps=((0, 1),), file="/app/vllm/model.py", kind="d2h"):
    counts = [SiteStep(0, index, n) for index, n in steps]
    total = sum(n for _, n in steps)
    return Site(file=file, line=line, function=function, kind=kind, count=total, steps=counts, source="x.item()")


def change(difference, figure, batch_class="decode"):
    return next(c for c in difference.changes if (c.batch_class, c.figure) == (batch_class, figure))


def noisy(seed, scale=1.0, n=200):
    rng = random.Random(seed)
    return [step(i, duration=scale * rng.lognormvariate(6, 0.2)) for i in range(n)]


def test_a_report_does_not_differ_from_itself():
    one = report([step(i, d2h=i % 2) for i in range(20)], [site(steps=[(i, 1) for i in range(1, 20, 2)])])
    difference = compare(one, one)
    assert difference.exit_code == 0
    assert not difference.regressions
    assert not difference.improvements


def test_one_more_sync_in_one_step_of_a_sync_free_class_is_worse():
    before = report(step(i) for i in range(500))
    after = report(step(i, d2h=int(i == 77)) for i in range(500))
    difference = compare(before, after)
    assert difference.exit_code == 1
    assert change(difference, "syncs").direction == "worse"
    assert "was 0 in every step, now up to 1 (1 of 500 steps)" in change(difference, "syncs").why
    back = compare(after, before)
    assert change(back, "syncs").direction == "better"
    assert back.exit_code == 0


def test_counts_are_exact_even_over_few_steps():
    difference = compare(report([step(0, kernels=60)]), report([step(0, kernels=61)]))
    assert change(difference, "launches").direction == "worse"
    assert change(difference, "launches").percent == pytest.approx(100 / 60)


def test_a_constant_that_mostly_fell_is_not_worse_for_one_higher_step():
    before = report(step(i, kernels=60) for i in range(100))
    after = report(step(i, kernels=61 if i == 0 else 10) for i in range(100))
    assert change(compare(before, after), "launches").direction == "better"


def test_counts_that_vary_need_more_than_chance():
    rng = random.Random(3)
    draw = [report(step(i, kernels=rng.choice([10, 11, 12])) for i in range(200)) for _ in range(20)]
    assert all(change(compare(a, b), "launches").direction == "same" for a, b in pairwise(draw))
    more = report(step(i, kernels=rng.choice([11, 12, 13])) for i in range(200))
    assert change(compare(draw[0], more), "launches").direction == "worse"


def test_times_of_the_same_code_do_not_differ():
    runs = [report(noisy(seed)) for seed in range(30)]
    for a, b in pairwise(runs):
        assert change(compare(a, b), "duration_us").direction == "same"


def test_times_that_clearly_moved_have_a_direction():
    before = report(noisy(1))
    assert change(compare(before, report(noisy(2, 1.5))), "duration_us").direction == "worse"
    assert change(compare(before, report(noisy(2, 0.6))), "duration_us").direction == "better"
    assert compare(before, report(noisy(2, 1.5))).exit_code == 1


def test_a_shift_too_small_to_matter_is_no_difference_however_certain():
    before, after = ([step(i, duration=d + (i % 3) * 0.1) for i in range(300)] for d in (100.0, 103.0))
    difference = compare(report(before), report(after))
    assert change(difference, "duration_us").direction == "same"
    strict = compare(report(before), report(after), shift=0.02)
    assert change(strict, "duration_us").direction == "worse"


def test_few_times_are_not_judged():
    difference = compare(report(noisy(1, n=5)), report(noisy(2, 3.0, n=5)))
    assert change(difference, "duration_us").direction == "unknown"


def test_warm_up_steps_are_left_out_of_both():
    before = report([step(0)])
    after = report([step(0, d2h=9, warmup=True, warmup_cause="compile"), step(1)])
    assert compare(before, after).exit_code == 0


def test_a_new_site_is_worse_a_gone_one_better_and_a_moved_line_neither():
    ten = [(i, 1) for i in range(10)]
    before = report([step(i, d2h=2) for i in range(10)], [site(7, "kept", ten), site(9, "gone", ten)])
    after = report(
        [step(i, d2h=2) for i in range(10)],
        [site(17, "kept", ten, file="/other/checkout/vllm/model.py"), site(20, "new", ten)],
    )
    difference = compare(before, after)
    assert {s.function: s.direction for s in difference.sites} == {"kept": "same", "gone": "better", "new": "worse"}
    assert difference.exit_code == 1
    kept = next(s for s in difference.sites if s.function == "kept")
    assert (kept.line_before, kept.line_after) == (7, 17)


def test_a_figure_that_is_no_longer_known_is_never_fine():
    before = report([step(0)])
    after = report([Step(index=0, batch_class="decode", duration_us=1.0)])
    difference = compare(before, after)
    assert difference.exit_code == 4
    assert "decode: syncs was 0, is unknown now" in difference.lost
    assert compare(after, before).exit_code == 4  # nothing is known on both sides
    assert compare(after, after).exit_code == 4


def test_a_class_of_one_side_only_is_said_and_nothing_in_common_is_no_pass():
    difference = compare(report([step(0, "decode")]), report([step(0, "extend")]))
    assert difference.exit_code == 4
    assert difference.notes == [
        "decode: only before (1 steps): not compared",
        "extend: only after (1 steps): not compared",
    ]


def test_the_rank_test_agrees_with_published_values():
    # Mann and Whitney's statistic on a textbook case: U = 23 of 25 pairs, one tie of two.
    slower, _ = rank_test([1, 2, 3, 4, 5], [4, 6, 7, 8, 9])
    assert slower == pytest.approx(23.5 / 25)
    rng = random.Random(5)
    a, b = ([rng.gauss(0, 1) for _ in range(60)] for _ in range(2))
    pairs = sum((y > x) + 0.5 * (y == x) for x in a for y in b) / 3600
    assert rank_test(a, b)[0] == pytest.approx(pairs)
    assert rank_test([1, 1], [1, 1]) == (0.5, 1.0)


def test_the_rank_test_seldom_mistakes_chance_for_a_difference():
    rng = random.Random(11)
    chances = [rank_test([rng.random() for _ in range(40)], [rng.random() for _ in range(40)])[1] for _ in range(2000)]
    assert sum(c < 0.05 for c in chances) / 2000 == pytest.approx(0.05, abs=0.02)
    assert not any(c < CHANCE for c in chances)


def test_the_rendered_difference_names_class_figure_and_line():
    ten = [(i, 1) for i in range(10)]
    difference = compare(
        report(step(i) for i in range(10)), report([step(i, d2h=1) for i in range(10)], [site(steps=ten)])
    )
    made = console(width=160)
    with made.capture() as captured:
        made.print(render_diff(difference))
    text = captured.get()
    for part in ("decode", "syncs", "▲ worse", "vllm/model.py:7 forward", "3 worse, 0 better"):
        assert part in text


def test_the_markdown_has_the_changes_first_and_escapes_what_would_break_a_table():
    ten = [(i, 1) for i in range(10)]
    bad = site(steps=ten)
    bad.source, bad.hint = "a = x | y", "keep <b>it</b> | `so`"
    difference = compare(report(step(i) for i in range(10)), report([step(i, d2h=1) for i in range(10)], [bad]))
    text = render_markdown(difference)
    assert text.index("| 🔴 | decode | syncs | 0 | 1 |") < text.index("<details>")
    assert "`a = x \\| y`" in text
    assert "`vllm/model.py:7 forward`" in text
    assert "keep \\<b\\>it\\</b\\> \\| \\`so\\`" in text
    widths = {
        line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("| 🔴 | decode | d2h")
    }
    assert widths == {7}
    bad.source = "`x`"
    difference = compare(report(step(i) for i in range(10)), report([step(i, d2h=1) for i in range(10)], [bad]))
    assert "| `` `x` `` |" in render_markdown(difference)
    assert render_markdown(compare(report([step(0)]), report([step(0)]))).startswith("### syncfree")
