"""The table, the memory and the path rule are the same on both sides."""

import ctypes

import pytest
from syncfree.profiler import sites
from syncfree.profiler.apis import lookup
from syncfree.profiler.calls import Direction, Role
from syncfree.profiler.collectors.base import Counters
from syncfree.profiler.probe import CUDA, HIP, VENDORS, arena
from syncfree.profiler.probe.entry_points import CONFIG_STREAM, Reads, encoded, vendor_of


def test_the_memory_is_laid_out_as_the_hooks_have_it(harness):
    told = (ctypes.c_int64 * 16)()
    count = harness.probe_layout(told)
    o = arena.OFFSETS
    mine = [arena.SIZE, *(o[n] for n in ("counters", "ring_head", "python", "entries", "original", "threads", "codes"))]
    mine += [o["ring"], o["pool"], arena.THREAD_SIZE, arena.CODE.size, arena.RECORD_SIZE]
    assert list(told)[:count] == mine
    assert o["threads"] % arena.CACHE_LINE == arena.THREAD_SIZE % arena.CACHE_LINE == 0
    assert len({o[n] // arena.CACHE_LINE for n in ("kernels", "graphs", "captures")}) == 1


def test_the_counters_are_those_of_the_collectors():
    assert [n for n in Counters.__struct_fields__ if n != "blocked_unknown"] == arena.COUNTERS


@pytest.mark.parametrize("vendor", VENDORS.values(), ids=lambda v: v.name)
def test_every_entry_point_means_something_and_reads_only_arguments_that_travel(vendor):
    rows = encoded(vendor)
    assert len(rows) <= arena.MAX_ENTRIES
    assert len({symbol for symbol, *_ in rows}) == len(rows)
    for point in vendor.table:
        assert point.capture or lookup(point.name).role in set(Role) - {Role.OTHER, Role.DEVICE_WAIT}, point.name
        used = [point.kind, *point.nbytes, point.dst, point.src, point.stream]
        assert all(a < 14 or a == CONFIG_STREAM for a in used), point.name
        if lookup(point.name).role is Role.COPY and lookup(point.name).direction is None:
            assert point.reads is not Reads.NAME or "Peer" in point.name or "AtoA" in point.name, point.name


@pytest.mark.parametrize("vendor", VENDORS.values(), ids=lambda v: v.name)
def test_an_asynchronous_call_tells_its_stream(vendor):
    for point in vendor.table:
        if point.name.endswith("Async") or "Launch" in point.name:
            assert point.stream >= 0 or "MultiDevice" in point.name, point.name


def test_a_host_address_is_known_where_the_direction_says_that_there_is_one():
    for point in (*CUDA.table, *HIP.table):
        direction = lookup(point.name).direction
        if direction is Direction.D2H:
            assert point.dst >= 0, point.name
        if direction is Direction.H2D:
            assert point.src >= 0, point.name


@pytest.mark.parametrize(
    ("file", "vendor"),
    [
        ("libcuda.so.1", CUDA),
        ("libcuda.so.580.159.04", CUDA),
        ("libcudart.so.13", None),
        ("libamdhip64.so", HIP),
        ("libamdhip64.so.5.2.21153", HIP),
        ("libc.so.6", None),
    ],
)
def test_the_runtime_is_known_by_its_file_name(file, vendor):
    assert vendor_of(file) is vendor


@pytest.mark.parametrize(
    "file",
    [
        "/home/me/run.py",
        "<stdin>",
        "<stdin>x",
        "<ipython-input-3>",
        "<frozen importlib._bootstrap>",
        "<string>",
        "/usr/lib/python3/site-packages/torch/_tensor.py",
        "torch/_tensor.py",
        "/home/torch/model.py",
        f"{sites.STDLIB}threading.py",
        f"{sites.STDLIB}site-packages/vllm/worker.py",
        f"{sites.OWN[0]}session.py",
        f"{sites.OWN[1]}batch.py",
        f"{sites.OWN[0][:-1]}_other.py",
        "",
    ],
)
def test_a_frame_is_the_users_by_the_same_rule_in_c(harness, file):
    assert harness.harness_start() == 0
    harness.harness_arena.restype = ctypes.c_void_p
    base = harness.harness_arena()
    for index, prefix in enumerate((*sites.OWN, sites.STDLIB)):
        at = base + arena.OFFSETS["prefixes"] + arena.PREFIX * index
        ctypes.memmove(at, prefix.encode() + b"\0", len(prefix) + 1)
    assert bool(harness.harness_is_foreign(file.encode(), ctypes.c_long(len(file)))) == sites.is_foreign(file)
