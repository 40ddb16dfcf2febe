"""Tracks for Perfetto: valid Chrome trace JSON with steps, phases and waits of each rank."""

import json

import pytest
from syncfree.profiler.renderers.perfetto import render_perfetto
from syncfree.profiler.report import PhaseFigures, Report, Step, Syncs


def tracks(report):
    document = json.loads(render_perfetto(report))
    events = document["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["pid"], names[event["pid"], event["tid"]]), []).append(event)
    return found, events


def test_every_event_has_what_the_format_asks_for(full):
    _, events = tracks(full)
    for event in events:
        assert {"ph", "name", "pid"} <= event.keys()
        assert event["ph"] in "XMC"
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())


def test_steps_phases_and_waits_lie_where_they_were(traced):
    found, _ = tracks(traced)
    steps = found[3, "steps"]
    assert [(e["name"], e["ts"], e["dur"]) for e in steps] == [
        ("0 decode", 0, 6000.5),
        ("1 decode", 10_000, 6000.5),
        ("2 decode", 20_000, 6000.5),
    ]
    assert [e["args"]["syncs"]["total"] for e in steps] == [0, 1, 0]
    waits = found[3, "waits for the device"]
    assert [(e["name"], e["ts"], e["dur"], e["args"]) for e in waits] == [
        ("vllm/v1/attention/backends/bad.py:7 build", 10_910, 258, {"step": 1, "kind": "d2h"}),
        ("cudaDeviceSynchronize", pytest.approx(99_999.875), 12, {"step": None, "kind": "device"}),
    ]


def test_ranks_of_one_machine_share_a_clock_and_others_begin_together(full):
    found, _ = tracks(full)
    assert [found[rank, "steps"][0]["ts"] for rank in (0, 1)] == [0, 1]
    for step in full.steps:
        step.start_us += 1e13 * step.rank
    full.timeline, full.run_ahead.series = [], []
    found, _ = tracks(full)
    assert [found[rank, "steps"][0]["ts"] for rank in (0, 1)] == [0, 0]


def test_recordings_days_apart_stay_readable(full):
    for step in full.steps:
        step.start_us += 1e12 * (step.index >= 10)
    full.timeline, full.run_ahead.series = [], []
    found, _ = tracks(full)
    assert found[0, "steps"][-1]["ts"] < 200_000
    assert [e["ts"] for e in found[0, "steps"]] == sorted(e["ts"] for e in found[0, "steps"])


def test_steps_without_start_times_are_laid_end_to_end_with_their_phases():
    def step(i):
        phases = {"forward": PhaseFigures(duration_us=60.0), "build": PhaseFigures(duration_us=30.0)}
        return Step(index=i, batch_class="decode", duration_us=100.0, phases=phases, syncs=Syncs())

    found, _ = tracks(Report(steps=[step(0), step(1)]))
    assert [(e["ts"], e["dur"]) for e in found[0, "steps"]] == [(0, 100), (100, 100)]
    assert [(e["name"], e["ts"], e["dur"]) for e in found[0, "phases"]] == [
        ("build", 0, 30),
        ("forward", 30, 60),
        ("build", 100, 30),
        ("forward", 130, 60),
    ]


def test_a_report_of_nothing_is_an_empty_trace():
    assert json.loads(render_perfetto(Report()))["traceEvents"] == []
