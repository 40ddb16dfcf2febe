"""The demonstration workload: every batch class, the same steps whichever builder, sync-free only when planned."""

from pathlib import Path

import pytest
import torch
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


@pytest.fixture(scope="module")
def reports():
    if torch.cuda.is_available():
        pytest.skip("the demo runs on the GPU here")
    return {builder: run_demo(builder) for builder in BUILDERS}


def test_the_demo_says_what_it_is(reports):
    for builder, report in reports.items():
        assert report.source.kind == "demo"
        assert report.source.engine == f"syncfree engine ({builder})"
        assert report.source.device == "simulated"
        assert len(report.steps) == 64


def test_planned_metadata_is_sync_free_in_every_class(reports):
    planned = reports["planned"]
    assert {name: figures.verdict for name, figures in planned.classes.items()} == dict.fromkeys(CLASSES, "sync-free")
    assert [(site.function, site.phase) for site in planned.sites] == [("TokenFetch.__call__", "output")]
    for step in planned.steps:
        assert step.phases["build"].copies.h2d == 1
        assert step.phases["build"].launches.kernels == 0
        assert step.phases["forward"].copies.h2d == step.phases["forward"].copies.d2h == 0
        assert step.phases["output"].syncs.total <= 1


def test_unplanned_metadata_waits_in_its_builder_in_every_class(reports):
    unplanned = reports["unplanned"]
    assert {name: figures.verdict for name, figures in unplanned.classes.items()} == dict.fromkeys(CLASSES, "syncs")
    waits = [site for site in unplanned.sites if site.phase in ("build", "forward")]
    assert {(Path(site.file).name, site.phase) for site in waits} == {("builders.py", "build")}
    for site in waits:
        assert site.source == Path(site.file).read_text().splitlines()[site.line - 1].strip()
    assert any("seq_lens.cpu()" in site.source for site in waits)
    assert any(".item()" in site.source for site in waits)


def test_no_read_of_memory_that_may_still_be_written(reports):
    assert not [note for report in reports.values() for note in report.notes if note.kind == "hazard"]


def test_the_demo_leaves_nothing_behind(reports):
    threads = torch.get_num_threads()
    run_demo("planned", 2)
    assert torch.get_num_threads() == threads
    assert not torch.cuda.is_available()


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
