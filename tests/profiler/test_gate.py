"""Judging a report by a budget."""

from datetime import date

import pytest
from syncfree.profiler.budget import parse_budget, parse_fail_on
from syncfree.profiler.gate import check
from syncfree.profiler.report import (
    Copies,
    Launches,
    Note,
    PhaseFigures,
    Report,
    Site,
    SiteStep,
    Source,
    Step,
    Syncs,
)


def figures(d2h=0, stream=0, kernels=0, graphs=0, blocked=0.0, duration=None):
    return {
        "syncs": Syncs(total=d2h + stream, d2h=d2h, h2d=0, stream=stream, device=0, event=0, memset=0, maybe=0),
        "copies": Copies(d2h=d2h, h2d=0, d2d=0, d2h_bytes=8 * d2h, h2d_bytes=0),
        "launches": Launches(kernels=kernels, graphs=graphs, captured=0),
        "blocked_us": blocked,
        "duration_us": duration,
    }


def step(index, batch_class="decode", phases=None, other=None, **about):
    keys = ("d2h", "stream", "kernels", "graphs", "blocked", "duration")
    whole = figures(**{key: about.pop(key) for key in keys if key in about})
    return Step(
        index=index,
        batch_class=batch_class,
        phases={name: PhaseFigures(**figures(**f)) for name, f in (phases or {}).items()},
        other_threads={name: PhaseFigures(**figures(**f)) for name, f in (other or {}).items()},
        **whole,
        **about,
    )


def site(function="forward", kind="d2h", phase="other", steps=((0, 1),), **about):
    return Site(
        file="/app/model.py",
        line=7,
        function=function,
        kind=kind,
        phase=phase,
        count=sum(n for _, n, *_ in steps),
        steps=[SiteStep(0, index, n, *rest) for index, n, *rest in steps],
        source="n = lens.item()",
        hint="keep a host copy",
        **about,
    )


def judge(text, steps, sites=(), today=date(2026, 1, 1), **about):
    return check(Report(steps=list(steps), sites=list(sites), **about), parse_budget(text), today=today)


def fail_on(spec, steps, sites=(), **about):
    return check(Report(steps=list(steps), sites=list(sites), **about), parse_fail_on([spec]))


def test_a_kept_budget_passes():
    gate = judge("[budget.decode]\nsyncs=0\nlaunches=60", [step(0, kernels=59, graphs=1)])
    assert gate.exit_code == 0
    assert [(j.figure, j.got) for j in gate.kept] == [("syncs", 0), ("launches", 60)]


def test_an_exceeded_limit_names_class_figure_value_and_line():
    gate = judge("[budget.decode]\nsyncs=0", [step(0), step(1, d2h=2)], [site(steps=((1, 2),))])
    assert gate.exit_code == 1
    text = gate.text()
    assert "decode: syncs = 2 > 0 (max over 2 steps, whole step)" in text
    assert "d2h /app/model.py:7 in forward (2x, 2 in one step)" in text
    assert "n = lens.item()" in text
    assert "mend: keep a host copy" in text
    assert gate.violations[0].worst == (0, 1)
    assert gate.violations[0].steps_over == 1


@pytest.mark.parametrize(("stat", "code"), [("max", 1), ("p99", 1), ("mean", 0), ("p50", 0)])
def test_the_statistic_decides(stat, code):
    steps = [step(i, d2h=int(i == 3)) for i in range(10)]
    assert judge(f"[budget.decode]\nd2h=0.5\nstat='{stat}'", steps).exit_code == code


def test_only_build_and_forward_are_judged_unless_told_otherwise():
    phases = {"build": {"d2h": 0}, "forward": {"kernels": 5}, "output": {"d2h": 1}}
    steps = [step(0, phases=phases, d2h=1, kernels=5)]
    sites = [site(phase="output")]
    assert judge("[budget.decode]\nsyncs=0", steps, sites).exit_code == 0
    assert judge('[budget.decode]\nsyncs=0\nphases=["output"]', steps, sites).exit_code == 1
    assert judge('[budget.decode]\nsyncs=0\nphases=["*"]', steps, sites).exit_code == 1
    assert judge('[budget.decode]\nlaunches=4\nphases=["build"]', steps, sites).exit_code == 0


def test_a_step_with_neither_build_nor_forward_is_judged_whole():
    assert judge("[budget.decode]\nsyncs=0", [step(0, phases={"sample": {"d2h": 1}}, d2h=1)]).exit_code == 1


@pytest.mark.parametrize("cause", ["warmup", "compile", "capture"])
def test_preparation_is_exempt_and_countable_on_request(cause):
    steps = [step(0, d2h=3, warmup=True, warmup_cause=cause), step(1)]
    assert judge("[budget.decode]\nsyncs=0", steps).exit_code == 0
    counted = judge("[budget.decode]\nsyncs=0\nexempt=[]", steps)
    assert counted.exit_code == 1
    assert counted.violations[0].steps == 2
    others = {"warmup", "compile", "capture"} - {cause}
    assert judge(f"[budget.decode]\nsyncs=0\nexempt={sorted(others)}", steps).exit_code == 1


def test_other_threads_are_exempt_and_countable_on_request():
    steps = [step(0, d2h=2, other={"other": {"d2h": 2}})]
    sites = [site(steps=((0, 2, 2),))]
    assert judge("[budget.decode]\nsyncs=0", steps, sites).exit_code == 0
    gate = judge("[budget.decode]\nsyncs=0\nexempt=[]", steps, sites)
    assert gate.exit_code == 1
    assert gate.violations[0].sites[0].count == 2


def test_an_unknown_figure_is_never_a_pass():
    unknown = Step(index=0, batch_class="decode")
    note = Note(kind="device", text="this device is the CPU")
    gate = judge("[budget.decode]\nsyncs=0", [unknown], notes=[note])
    assert gate.exit_code == 4
    assert "decode: syncs: not measured: unknown in 1 of 1 steps" in gate.text()
    assert "this device is the CPU" in gate.text()


def test_one_step_over_the_maximum_is_certain_though_another_is_unknown():
    steps = [Step(index=0, batch_class="decode"), step(1, d2h=1)]
    assert judge("[budget.decode]\nsyncs=0", steps).exit_code == 1
    assert judge("[budget.decode]\nsyncs=0\nstat='mean'", steps).exit_code == 4
    assert judge("[budget.decode]\nsyncs=1", steps).exit_code == 4


def test_a_class_without_steps_is_not_measured_unless_optional():
    gate = judge("[budget.decod]\nsyncs=0", [step(0)])
    assert gate.exit_code == 4
    assert "decod: syncs: not measured: no such step was recorded (recorded: decode)" in gate.text()
    assert judge("[budget.extend]\nsyncs=0\noptional=true", [step(0)]).exit_code == 0
    assert fail_on("decode:syncs=0", []).exit_code == 4


def test_a_class_whose_steps_are_all_exempt_is_not_measured():
    gate = judge("[budget.decode]\nsyncs=0", [step(0, warmup=True, warmup_cause="compile")])
    assert gate.exit_code == 4
    assert "all 1 steps are exempt (compile)" in gate.text()


def test_optional_forgives_a_missing_class_but_not_an_unknown_figure():
    unknown = Step(index=0, batch_class="decode")
    assert judge("[budget.decode]\nsyncs=0\noptional=true", [unknown]).exit_code == 4


def test_a_phase_nobody_recorded_is_not_measured():
    gate = judge('[budget.decode]\nsyncs=0\nphases=["biuld"]', [step(0, phases={"build": {}})])
    assert gate.exit_code == 4
    assert "no decode step has a phase 'biuld'" in gate.text()


def test_a_star_is_every_class_without_a_table_of_its_own():
    steps = [step(0, d2h=5), step(1, "extend", d2h=1), step(2, "causal_prefill")]
    gate = judge('[budget.decode]\nsyncs=5\n[budget."*"]\nsyncs=0', steps)
    assert [v.batch_class for v in gate.violations] == ["extend"]
    assert judge('[budget."*"]\nsyncs=0', []).exit_code == 4


def test_an_allowed_site_does_not_count_but_others_of_the_step_do():
    steps = [step(0, d2h=2)]
    sites = [site("known", steps=((0, 1),)), site("new", steps=((0, 1),))]
    text = "[budget.decode]\nsyncs=0\n[[allow]]\nsite='model.py:known'\nreason='r'\nuntil=2027-03-01"
    gate = judge(text, steps, sites)
    assert gate.violations[0].got == 1
    assert [share.site.function for share in gate.violations[0].sites] == ["new"]
    assert judge(text, [step(0, d2h=1)], sites[:1]).exit_code == 0


def test_an_allowed_site_is_taken_off_its_own_step_and_phase_only():
    steps = [step(0, d2h=1), step(1, d2h=1)]
    text = "[budget.decode]\nsyncs=0\n[[allow]]\nsite='model.py:known'\nreason='r'"
    gate = judge(text, steps, [site("known", steps=((0, 1),)), site("new", steps=((1, 1),))])
    assert gate.violations[0].got == 1
    assert gate.violations[0].worst == (0, 1)
    phases = {"build": {"d2h": 1}, "output": {"d2h": 1}}
    elsewhere = [site("known", phase="output", steps=((0, 1),)), site("new", phase="build", steps=((0, 1),))]
    assert judge(text, [step(0, d2h=2, phases=phases)], elsewhere).violations[0].got == 1


def test_an_expired_entry_fails_by_name_and_counts_again():
    text = "[budget.decode]\nsyncs=0\n[[allow]]\nsite='model.py:known'\nreason='until mended'\nuntil=2027-03-01"
    steps, sites = [step(0, d2h=1)], [site("known")]
    gate = judge(text, steps, sites, today=date(2027, 3, 2))
    assert gate.exit_code == 1
    assert "model.py:known was allowed until 2027-03-01 (until mended)" in gate.text()
    assert gate.violations[0].got == 1
    assert judge(text, steps, sites, today=date(2027, 3, 1)).exit_code == 0
    assert judge(text, [step(0)], today=date(2027, 3, 2)).exit_code == 1


def test_an_entry_that_matches_nothing_is_noted():
    gate = judge("[budget.decode]\nsyncs=0\n[[allow]]\nsite='gone.py:f'\nreason='r'", [step(0)])
    assert gate.exit_code == 0
    assert any("gone.py:f matches no site" in note for note in gate.notes)


def test_what_the_engines_own_checker_allows_counts_unless_exempt():
    steps, sites = [step(0, d2h=1)], [site(allowed_upstream=True)]
    assert judge("[budget.decode]\nsyncs=0", steps, sites).exit_code == 1
    assert judge("[budget.decode]\nsyncs=0\nexempt=['allowed_upstream']", steps, sites).exit_code == 0


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("syncs", 3),
        ("d2h", 2),
        ("stream", 1),
        ("h2d", 0),
        ("copies", 2),
        ("copies_d2h", 2),
        ("d2h_bytes", 16),
        ("launches", 9),
        ("kernels", 7),
        ("graphs", 2),
        ("blocked_us", 12.5),
        ("duration_us", 100.0),
    ],
)
def test_every_figure_can_be_limited(figure, value):
    steps = [step(0, d2h=2, stream=1, kernels=7, graphs=2, blocked=12.5, duration=100.0)]
    assert fail_on(f"decode:{figure}={value}", steps).exit_code == 0
    if value:
        gate = fail_on(f"decode:{figure}={value - 0.5}", steps)
        assert gate.exit_code == 1
        assert gate.violations[0].got == value


def test_build_time_and_step_time_are_about_their_own_spans():
    steps = [step(0, phases={"build": {"duration": 40.0}, "forward": {"duration": 5.0}}, duration=100.0)]
    gate = fail_on("decode:build_us=39,duration_us=99", steps)
    assert {v.figure: (v.got, v.phases) for v in gate.violations} == {
        "build_us": (40.0, ("build",)),
        "duration_us": (100.0, ("*",)),
    }
    in_phases = judge('[budget.decode]\nduration_us=44\nphases=["build", "forward"]', steps)
    assert in_phases.violations[0].got == 45.0


def test_a_partial_report_is_said_to_be_one():
    gate = judge("[budget.decode]\nsyncs=0", [step(0)], source=Source(partial=True))
    assert any("partial" in note for note in gate.notes)


def test_an_exceeded_budget_outweighs_an_unmeasured_one():
    gate = judge("[budget.decode]\nsyncs=0\n[budget.extend]\nsyncs=0", [step(0, d2h=1)])
    assert (len(gate.violations), len(gate.unmeasured), gate.exit_code) == (1, 1, 1)
