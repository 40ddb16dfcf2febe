"""Reports of several ranks as one."""

import pytest
from syncfree.profiler.merge import merge_reports
from syncfree.profiler.report import (
    Distribution,
    Launches,
    Note,
    PlannerFigures,
    Report,
    RunAhead,
    Site,
    SiteStep,
    Source,
    Span,
    Step,
    Syncs,
    Totals,
)


def report(rank=0, syncs=1, **more):
    site = Site(
        file="a.py", line=3, function="f", kind="d2h", count=syncs, per_step=float(syncs), blocked_us=10.0,
        classes={"decode": syncs}, threads=[f"t{rank}"], steps=[SiteStep(rank, 0, syncs)],
    )  # fmt: skip
    return Report(
        source=Source(kind="trace", ranks=[rank], device="A", files=[f"{rank}.json"]),
        steps=[Step(rank=rank, index=0, batch_class="decode", syncs=Syncs(total=syncs), duration_us=5.0)],
        sites=[site],
        totals=Totals(
            launches=Launches(kernels=2, graphs=1, captured=0), kernels_run=4, syncs=Syncs(total=syncs), api={"x": 1}
        ),
        timeline=[Span(kind="sync", name="a", start_us=9.0 - rank, rank=rank, step=0)],
        notes=[Note(kind="input", text=f"of {rank}")],
        **more,
    )


def test_ranks_lie_side_by_side():
    merged = merge_reports([report(1, 2), report(0, 0)])
    assert [(step.rank, step.index) for step in merged.steps] == [(0, 0), (1, 0)]
    assert merged.source.ranks == [0, 1]
    assert (merged.source.device, merged.source.files) == ("A", ["1.json", "0.json"])
    assert (merged.totals.launches.kernels, merged.totals.kernels_run, merged.totals.api) == (4, 8, {"x": 2})
    assert [note.text for note in merged.notes] == ["of 1", "of 0"]
    assert [span.rank for span in merged.timeline] == [1, 0]


def test_sites_of_one_line_are_one():
    (site,) = merge_reports([report(0, 1), report(1, 3)]).sites
    assert (site.count, site.per_step, site.blocked_us, site.threads) == (4, 2.0, 20.0, ["t0", "t1"])
    assert site.classes == {"decode": 4}
    assert [(seen.rank, seen.index, seen.count) for seen in site.steps] == [(0, 0, 1), (1, 0, 3)]


def test_classes_are_of_all_steps():
    figures = merge_reports([report(0, 0), report(1, 2)]).classes["decode"]
    assert (figures.steps, figures.syncs_per_step.max, figures.verdict) == (2, 2, "syncs")


def test_one_rank_twice_is_counted_on_in_steps_sites_and_spans():
    merged = merge_reports([report(5), report(5)])
    assert [(step.rank, step.index) for step in merged.steps] == [(5, 0), (5, 1)]
    assert [(seen.rank, seen.index) for seen in merged.sites[0].steps] == [(5, 0), (5, 1)]
    assert [span.step for span in merged.timeline] == [0, 1]


def test_unknown_and_known_are_unknown():
    other = report(1)
    other.totals = Totals(kernels_run=3)
    other.sites[0].blocked_us = None
    merged = merge_reports([report(0), other])
    assert (merged.totals.launches.kernels, merged.totals.syncs.total, merged.totals.kernels_run) == (None, None, 7)
    assert merged.sites[0].blocked_us is None


def test_telemetry_planner_and_run_ahead():
    ahead = RunAhead(
        launch_lead_us=Distribution(mean=1, p50=1, p99=1, max=1), launch_lead_min_us=1.0, device_idle_us=2.0
    )
    first = report(
        0, telemetry={"devices": []}, planner=PlannerFigures(mode="shadow", mismatches=1, unread=2), run_ahead=ahead
    )
    second = report(1, planner=PlannerFigures(mode="shadow", mismatches=2, unread=None, first_mismatch="x"))
    merged = merge_reports([first, second])
    assert merged.telemetry == {"devices": []}
    assert (merged.planner.mode, merged.planner.mismatches, merged.planner.unread) == ("shadow", 3, None)
    assert merged.planner.first_mismatch == "x"
    assert (merged.run_ahead.launch_lead_us.p50, merged.run_ahead.device_idle_us) == (1, 2.0)
    second.telemetry = {"devices": [1]}
    assert set(merge_reports([first, second]).telemetry) == {"rank 0", "rank 1"}


@pytest.mark.parametrize("count", [1, 3])
def test_what_comes_out_is_a_report(count):
    merged = merge_reports([report(rank) for rank in range(count)])
    assert Report.from_json(merged.to_json()) == merged
