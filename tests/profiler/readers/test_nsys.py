"""Nsight Systems exports whose schema lacks what later ones have."""

import sqlite3

import pytest
from syncfree.profiler.readers import read_traces

PROCESS = 500 << 24


@pytest.fixture
def export(tmp_path):
    """Writes an export of one process: a copy with its wait, a launch and its kernel."""

    def write(*, strings=True, processes=True, launcher=False):
        path = tmp_path / "trace.sqlite"
        db = sqlite3.connect(path)
        db.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, nameId, globalTid, correlationId)")
        calls = [(10, 20, 1, 1), (21, 40, 2, 2), (41, 42, 3, 3)]
        db.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)",
            [(start, end, name, PROCESS | 501, correlation) for start, end, name, correlation in calls],
        )
        if launcher:  # a parent process that asks for memory and launches nothing
            other = (501 << 24) | 9
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1, 2, 4, ?, 1)", (other,))
        column = ", globalPid" if processes else ""
        value = f", {PROCESS}" if processes else ""
        db.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, correlationId{column})")
        db.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (50, 60, 3{value})")
        db.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start, end, copyKind, correlationId{column})")
        db.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (12, 18, 2, 1{value})")
        if strings:
            db.execute("CREATE TABLE StringIds (id, value)")
            names = [
                "cudaMemcpyAsync_v3020",
                "cudaStreamSynchronize_v3020",
                "cudaLaunchKernel_ptsz_v7000",
                "cudaMalloc_v3020",
            ]
            db.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(names, 1))
        db.commit()
        db.close()
        return read_traces([path])

    return write


@pytest.mark.parametrize("processes", [True, False])
def test_records_without_a_process_belong_to_the_only_one(export, processes):
    report = export(processes=processes)
    totals = report.totals
    assert report.source.ranks == [0]
    assert (totals.launches.kernels, totals.kernels_run, totals.syncs.total, totals.syncs.d2h) == (1, 1, 1, 1)


def test_calls_without_names_are_unknown_not_zero(export):
    totals = export(strings=False).totals
    assert (totals.launches.kernels, totals.syncs.total, totals.kernels_run) == (None, None, 1)


def test_a_process_without_kernels_ran_none_where_others_of_the_recording_did(export):
    report = export(launcher=True)
    assert report.source.ranks == [0, 1]
    assert report.totals.kernels_run == 1
