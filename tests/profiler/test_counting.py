"""The rule of what is one sync."""

import pytest
from syncfree.profiler.apis import lookup
from syncfree.profiler.calls import Call, Direction, Frame, Role
from syncfree.profiler.counting import count_syncs, mark_captured

D2H, H2D, D2D = Direction.D2H, Direction.H2D, Direction.D2D


def calls(*names, thread=1):
    """Calls in order, 10 ns apart and 4 ns long; ("cudaMemcpyAsync", D2H) gives a direction."""
    made = []
    for i, item in enumerate(names):
        name, direction = item if isinstance(item, tuple) else (item, None)
        api = lookup(name)
        made.append(
            Call(
                api=name,
                role=api.role,
                wait=api.wait,
                direction=direction or api.direction,
                blocking=api.blocking,
                ts_ns=10 * i,
                dur_ns=4,
                thread=thread,
            )
        )
    return made


def kinds(made):
    return [sync.kind for sync in count_syncs(made)]


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        ([("cudaMemcpyAsync", D2H), "cudaStreamSynchronize"], ["d2h"]),
        ([("cudaMemcpyAsync", H2D), "cudaStreamSynchronize"], ["h2d"]),
        ([("cudaMemcpyAsync", D2D), "cudaStreamSynchronize"], ["stream"]),
        ([("cudaMemcpyAsync", D2H), "cudaEventRecord", "cudaEventSynchronize"], ["d2h"]),
        ([("cudaMemcpyAsync", D2H), "cudaEventQuery", "cudaStreamSynchronize"], ["d2h"]),
        ([("cudaMemcpyAsync", D2H), "cudaLaunchKernel", "cudaStreamSynchronize"], ["stream"]),
        ([("cudaMemcpyAsync", D2H), "cudaGraphLaunch", "cudaStreamSynchronize"], ["stream"]),
        ([("cudaMemcpyAsync", D2H), "cudaMemsetAsync", "cudaStreamSynchronize"], ["stream"]),
        ([("cudaMemcpyAsync", D2H), ("cudaMemcpyAsync", H2D), "cudaStreamSynchronize"], ["h2d"]),
        ([("cudaMemcpyAsync", D2H), "cudaDeviceSynchronize"], ["device"]),
        ([("cudaMemcpyAsync", D2H)], []),
        ([("hipMemcpyWithStream", D2H)], ["d2h"]),
        ([("hipMemcpyWithStream", D2H), "hipLaunchKernel"], ["d2h"]),
        ([("hipMemcpyWithStream", D2H), "hipStreamSynchronize"], ["d2h"]),
        ([("hipMemcpyWithStream", D2H), ("hipMemcpyWithStream", H2D)], ["d2h", "h2d"]),
        ([("hipMemcpyWithStream", D2H), "hipDeviceSynchronize"], ["d2h", "device"]),
        (["cudaMemcpy"], ["copy"]),
        (["cudaStreamSynchronize", "cudaStreamSynchronize"], ["stream", "stream"]),
        (["cudaEventQuery"] * 50, []),
        (["cudaStreamWaitEvent"], []),
        (["hipMemset"], ["memset"]),
        (["cudaMemsetAsync"], []),
        (["cudaMalloc", "cudaFree"], ["maybe", "maybe"]),
        ([("cudaMemcpyAsync", D2H), "cudaMalloc", "cudaStreamSynchronize"], ["d2h", "maybe"]),
    ],
)
def test_sequences_of_one_thread(sequence, expected):
    assert kinds(calls(*sequence)) == expected


def test_a_pageable_copy_to_the_device_may_have_waited_unless_a_wait_follows():
    for following, expected in ([], ["maybe"]), (["cudaLaunchKernel"], ["maybe"]), (["cudaStreamSynchronize"], ["h2d"]):
        made = calls(("cudaMemcpyAsync", H2D), *following)
        made[0].pageable = True
        assert kinds(made) == expected


def test_a_wait_of_another_thread_does_not_pair_with_the_copy():
    mine = calls(("cudaMemcpyAsync", D2H))
    other = calls("cudaEventRecord", "cudaStreamSynchronize", thread=2)
    assert kinds(mine + other) == ["stream"]


def test_the_site_of_a_pair_is_the_copy_and_its_time_is_both():
    [sync] = count_syncs(calls(("cudaMemcpyAsync", D2H), "cudaStreamSynchronize"))
    assert sync.call.api == "cudaMemcpyAsync"
    assert sync.blocked_ns == 8


def test_unknown_time_stays_unknown():
    made = calls(("cudaMemcpyAsync", D2H), "cudaStreamSynchronize")
    made[1].dur_ns = None
    assert count_syncs(made)[0].blocked_ns is None


def test_the_order_in_which_calls_arrive_does_not_matter():
    made = calls(("cudaMemcpyAsync", D2H), "cudaStreamSynchronize", "cudaLaunchKernel")
    assert kinds(reversed(made)) == ["d2h"]


def test_only_what_lies_between_begin_and_end_capture_of_its_thread_is_captured():
    made = calls("cudaLaunchKernel", "cudaStreamBeginCapture", "cudaLaunchKernel", "cudaStreamEndCapture")
    made += [Call(api="cudaLaunchKernel", role=Role.LAUNCH, ts_ns=t, thread=9) for t in (25, 45)]
    made.sort(key=lambda c: c.ts_ns)
    mark_captured(made)
    assert [(c.ts_ns, c.captured) for c in made if c.role is Role.LAUNCH] == [
        (0, False),
        (20, True),
        (25, False),
        (45, False),
    ]


@pytest.mark.parametrize(("wait", "kind"), [("cudaEventSynchronize", "event"), ("cudaStreamSynchronize", "stream")])
def test_an_asynchronous_copy_waited_for_on_another_line_is_one_sync_of_the_wait(wait, kind):
    made = calls(("cudaMemcpyAsync", D2H), "cudaEventRecord", wait)
    made[0].stack = (Frame("engine.py", 10, "fetch"),)
    made[2].stack = (Frame("engine.py", 12, "fetch"),)
    [sync] = count_syncs(made)
    assert (sync.kind, sync.call) == (kind, made[2])
    made[2].stack = (Frame("engine.py", 10, "fetch"),)
    [sync] = count_syncs(made)
    assert (sync.kind, sync.call) == (("event", made[2]) if kind == "event" else ("d2h", made[0]))


@pytest.mark.parametrize("names", [["cudaFree"], ["cudaMalloc"], [("cudaMemcpyAsync", H2D)]])
def test_a_collector_that_knows_better_overrules_maybe(names):
    [call] = calls(*names)
    call.pageable = call.role is Role.COPY
    assert kinds([call]) == ["maybe"]
    call.maybe = False
    assert kinds([call]) == []
