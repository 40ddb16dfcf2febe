"""What each runtime entry point is taken for, by its name."""

import pytest
from syncfree.profiler.apis import base_name, lookup
from syncfree.profiler.calls import Direction, Role, Wait


@pytest.mark.parametrize(
    "name",
    [
        "cudaLaunchKernel",
        "cudaLaunchKernel_v7000",
        "cudaLaunchKernelExC_v11060",
        "cuLaunchKernel_ptsz",
        "cuLaunchKernelEx",
        "hipLaunchKernel",
        "hipExtModuleLaunchKernel",
        "hipModuleLaunchCooperativeKernel",
    ],
)
def test_launch_entry_points_are_launches_whatever_their_suffix(name):
    assert lookup(name).role is Role.LAUNCH


@pytest.mark.parametrize("name", ["cudaGraphLaunch_v10000", "cuGraphLaunch", "hipGraphLaunch"])
def test_a_graph_launch_is_not_a_kernel_launch(name):
    assert lookup(name).role is Role.GRAPH_LAUNCH


@pytest.mark.parametrize(
    ("name", "wait"),
    [
        ("cudaStreamSynchronize_v3020", Wait.STREAM),
        ("cuEventSynchronize", Wait.EVENT),
        ("hipDeviceSynchronize", Wait.DEVICE),
        ("cuCtxSynchronize", Wait.DEVICE),
        ("hipEventSynchronize_spt", Wait.EVENT),
    ],
)
def test_waits_are_told_apart(name, wait):
    api = lookup(name)
    assert (api.role, api.wait) == (Role.SYNC, wait)


@pytest.mark.parametrize(
    ("name", "direction", "blocking"),
    [
        ("cudaMemcpy", None, True),
        ("cudaMemcpyAsync", None, False),
        ("hipMemcpyWithStream", None, True),
        ("hipMemcpyDtoH", Direction.D2H, True),
        ("cuMemcpyHtoDAsync_v2", Direction.H2D, False),
        ("cuMemcpyDtoHAsync_v2_ptsz", Direction.D2H, False),
        ("cudaMemcpy2DAsync", None, False),
        ("cudaMemcpyToSymbol", None, True),
        ("hipMemcpyFromSymbolAsync", None, False),
        ("cudaMemcpyPeerAsync", Direction.D2D, False),
        ("hipMemcpyParam2DAsync", None, False),
    ],
)
def test_copies_by_form_and_direction(name, direction, blocking):
    api = lookup(name)
    assert (api.role, api.direction, api.blocking) == (Role.COPY, direction, blocking)


@pytest.mark.parametrize(
    ("name", "blocking"), [("hipMemset", True), ("cuMemsetD32Async", False), ("hipMemsetD8", True)]
)
def test_memsets(name, blocking):
    api = lookup(name)
    assert (api.role, api.blocking) == (Role.MEMSET, blocking)


@pytest.mark.parametrize("name", ["cudaEventQuery", "hipStreamQuery", "cuStreamQuery_ptsz"])
def test_a_query_is_a_poll_and_not_a_sync(name):
    assert lookup(name).role is Role.POLL


@pytest.mark.parametrize("name", ["cudaStreamWaitEvent", "cudaFuncSetAttribute", "INVALID", "cudaEventRecord", ""])
def test_everything_else_neither_launches_nor_waits(name):
    assert lookup(name).role in (Role.OTHER, Role.DEVICE_WAIT)


def test_names_that_only_contain_an_entry_point_are_not_it():
    assert lookup("my_cudaLaunchKernel").role is Role.OTHER
    assert lookup("cudaStreamSynchronizeAll").role is Role.OTHER


def test_base_name_drops_every_suffix():
    assert base_name("cuMemcpyDtoHAsync_v2_ptsz") == "cuMemcpyDtoHAsync"
