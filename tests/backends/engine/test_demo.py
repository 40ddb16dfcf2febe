"""The demonstration workload: every batch class, the same steps whichever builder, sync-free only when planned."""

import pytest
from syncfree.backends.engine.demo import BUILDERS, profile_workload, run_demo
from syncfree.planner.errors import BadInput

CLASSES = {"decode", "extend", "chunked_prefill", "causal_prefill"}


def test_every_class_has_several_steps_and_every_step_its_phases():
    report = profile_workload("planned", 64, "cpu")
    assert set(report.classes) == CLASSES
    assert min(figures.steps for figures in report.classes.values()) >= 5
    assert all(list(step.phases) == ["build", "forward", "sample", "output"] for step in report.steps)
    assert any(step.mixed for step in report.steps)


def test_both_builders_serve_the_same_steps():
    steps = [
        [(step.batch_class, step.num_reqs, step.num_tokens) for step in profile_workload(builder, 40, "cpu").steps]
        for builder in BUILDERS
    ]
    assert steps[0] == steps[1]


def test_progress_counts_the_steps():
    seen = []
    profile_workload("planned", 5, "cpu", lambda done, seconds: seen.append((done, seconds >= 0)))
    assert seen == [(done, True) for done in range(1, 6)]


@pytest.mark.parametrize(
    ("builder", "steps", "said"),
    [("planned", 0, "steps: expected >= 1, got 0"), ("x", 3, "builder: expected unplanned")],
)
def test_bad_arguments_are_refused(builder, steps, said):
    with pytest.raises(BadInput, match=said):
        run_demo(builder, steps)
