import random

from syncfree.profiler.calls import Call, Role, Wait
from syncfree.profiler.windows import tag_allowed


def call(ts, thread=1):
    return Call(api="cuStreamSynchronize", role=Role.SYNC, wait=Wait.STREAM, ts_ns=ts, thread=thread)


def test_calls_inside_a_region_of_their_thread_are_tagged_and_no_others():
    rng = random.Random(4)
    for _ in range(200):
        regions = []
        for thread in (1, 2):
            edges = sorted(rng.sample(range(1000), 2 * rng.randrange(1, 8)))
            regions += [(thread, edges[i], edges[i + 1]) for i in range(0, len(edges), 2)]
        rng.shuffle(regions)
        calls = [call(rng.randrange(1000), rng.choice((1, 2, 3))) for _ in range(60)]
        tag_allowed(calls, regions)
        for each in calls:
            inside = any(t == each.thread and start <= each.ts_ns < end for t, start, end in regions)
            assert each.allowed_upstream is inside


def test_without_regions_nothing_is_tagged():
    calls = [call(5)]
    tag_allowed(calls, [])
    assert not calls[0].allowed_upstream
