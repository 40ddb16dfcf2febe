"""Reports to draw."""

from pathlib import Path

import pytest
from syncfree.profiler.readers import read_traces
from syncfree.profiler.report import (
    ClassFigures,
    Compared,
    Comparison,
    Distribution,
    GraphLaunches,
    LeadPoint,
    Note,
    Report,
    RunAhead,
    Site,
    Source,
    Span,
    Step,
    Syncs,
)

OWN = Path(__file__).resolve().parents[2] / "data" / "traces"
EVIL = "</script><script>alert(1)</script> | `x` <b>&amp;"


@pytest.fixture
def traced():
    return read_traces([OWN / "cuda_decode_rank3.json"])


@pytest.fixture
def full():
    """Every part of a report filled, two ranks, names that would break a page or a table."""
    steps = [
        Step(
            rank=rank,
            index=i,
            batch_class=("decode", "extend", "chunked_prefill", "causal_prefill", "unknown")[i % 5],
            duration_us=1000.0 + 400 * i,
            start_us=5e12 + 3000.0 * i + rank,
            syncs=Syncs(total=i % 3, d2h=i % 3),
            num_reqs=4,
            name=EVIL,
        )
        for rank in (0, 1)
        for i in range(20)
    ]
    device = {"index": 0, "name": "AMD <Test>", "series": {"t_s": [0, 1, 2], "utilisation_percent": [10, None, 30]}}
    device["series"]["power_watts"] = [100.0, 200.0, 300.0]
    return Report(
        source=Source(
            kind="live", engine=EVIL, device="AMD", ranks=[0, 1], collectors=["probe"], blind_spots={"probe": EVIL}
        ),
        steps=steps,
        classes={
            "decode": ClassFigures(
                steps=8, syncs_per_step=Distribution(mean=0, p50=0, p99=0, max=0), verdict="sync-free"
            ),
            "extend": ClassFigures(steps=8, syncs_per_step=Distribution(mean=1, p50=1, p99=2, max=2), verdict="syncs"),
            "unknown": ClassFigures(steps=8),
        },
        sites=[
            Site(
                file="/app/" + EVIL,
                line=7,
                function="build",
                kind="d2h",
                count=12,
                per_step=1.5,
                blocked_us=1234.5,
                device_idle_us=400.0,
                launch_lead_us=25.0,
                stack=[EVIL],
                source=EVIL,
                hint="pass it on",
                repeated=True,
                classes={"extend": 12},
            ),
            Site(
                file="",
                line=0,
                function="aten::item",
                kind="event",
                count=1,
                blocked_us=None,
                api="cudaEventSynchronize",
            ),
        ],
        telemetry={"source": "x", "devices": [device]},
        run_ahead=RunAhead(
            launch_lead_us=Distribution(mean=5, p50=5, p99=9, max=9),
            series=[LeadPoint(rank, 5e12 + 100.0 * i, 50.0 + i, 10.0) for rank in (0, 1) for i in range(20)],
            graph_launches=[GraphLaunches(api="hipGraphLaunch", launches=3, kernels=15, names={EVIL: 15})],
        ),
        timeline=[
            Span(kind="phase", name="forward", start_us=5e12 + 10, duration_us=500.0, rank=0, step=0),
            Span(kind="sync", name=EVIL, start_us=5e12 + 20, duration_us=30.0, rank=1, step=0, detail="d2h"),
        ],
        verification=[
            Comparison(
                left="probe",
                right="kineto",
                doubt=EVIL,
                figures=[Compared(name=EVIL, steps=3, differ=1, left=4, right=5)],
            )
        ],
        notes=[Note(kind="hazard", text=EVIL, file=EVIL, line=3)],
    )
