"""Our own small traces (tests/data/traces/make.py), read as worked out by hand from how they were made."""

import subprocess
import sys

import pytest
from syncfree.profiler.readers import read_traces


def figures(step):
    launches = step.launches
    return step.rank, step.batch_class, step.syncs.total, launches.kernels, launches.graphs, launches.captured


def test_cuda_decode(own):
    report = read_traces([own / "cuda_decode_rank3.json"])
    assert [figures(step) for step in report.steps] == [
        (3, "decode", 0, 1, 1, 0),
        (3, "decode", 1, 2, 1, 0),
        (3, "decode", 0, 1, 1, 0),
    ]
    assert [step.host_ops for step in report.steps] == [1, 2, 1]
    assert [step.duration_us for step in report.steps] == [6000.5] * 3
    assert report.totals.kernels_run == 3 * 6 + 1
    assert (report.totals.syncs.total, report.totals.syncs.device) == (2, 1)  # the profiler's own last wait too
    assert (report.source.device, report.source.cuda, report.source.engine) == ("NVIDIA Test Device", "12.4", "vllm")
    (site,) = report.sites
    assert (site.file, site.line, site.function) == ("vllm/v1/attention/backends/bad.py", 7, "build")
    assert (site.kind, site.count, site.blocked_us) == ("d2h", 1, 8 + 250)
    # Drained at 917 (the copy), next kernel at 1420: that the host waited cost the device 503 microseconds.
    assert site.device_idle_us == report.steps[1].device_idle_us == 503
    # Launches return at 17.25 and 130 of a step, their first kernels start at 40 and 200.
    assert (report.steps[0].launch_lead_us, report.steps[0].launch_lead_min_us) == (70, 22.75)
    (graphs,) = report.run_ahead.graph_launches
    assert (graphs.launches, graphs.kernels, graphs.names) == (3, 5, {"decode_kernel": 4, "norm_kernel": 1})


def test_rocm_mixed(own):
    report = read_traces([own / "rocm_mixed.json.gz"])
    capture, mixed = report.steps
    assert figures(capture) == (0, "unknown", 0, 0, 0, 3)
    assert capture.warmup_cause == "capture"
    assert figures(mixed) == (0, "chunked_prefill", 2, 2, 0, 0)  # both threads' launches; the outer of two ranges
    assert (mixed.coarse, mixed.mixed, mixed.num_reqs, mixed.num_tokens) == (True, True, 12, 260)
    assert (mixed.copies.h2d, mixed.copies.d2h, mixed.copies.d2d) == (2, 2, 0)  # the calls' kind, not the records'
    assert (mixed.copies.h2d_bytes, mixed.copies.d2h_bytes) == (300, 308)
    assert (report.source.hip, report.source.device, report.source.engine) == ("7.2.53211", None, "sglang")
    assert report.totals.kernels_run == 3
    assert any("1 kernels have no launch call" in note.text for note in report.notes)


RUN = ("run_hip_api_trace.csv", "run_kernel_trace.csv", "run_marker_api_trace.csv", "run_memory_copy_trace.csv")


@pytest.mark.parametrize("names", [RUN, ("run_results.json",)])
def test_rocprofv3(own, names):
    report = read_traces([own / name for name in names], steps="decode *")
    assert [figures(step) for step in report.steps] == [(0, "unknown", 1, 1, 1, 0), (0, "unknown", 1, 1, 0, 0)]
    assert [(step.syncs.d2h, step.syncs.h2d) for step in report.steps] == [(1, 0), (0, 1)]
    assert (report.totals.kernels_run, report.totals.syncs.maybe) == (8, 1)
    assert [step.device_idle_us for step in report.steps] == [7.0, 0.0]
    (graphs,) = report.run_ahead.graph_launches
    assert (graphs.launches, graphs.kernels, graphs.names) == (1, 6, {"node": 6})


def test_rocprofv3_files_without_each_other_leave_figures_unknown(own):
    api = read_traces([own / "run_hip_api_trace.csv"], steps="none").totals
    assert (api.launches.kernels, api.kernels_run) == (2, None)
    assert (api.syncs.total, api.syncs.d2h, api.syncs.h2d) == (2, None, None)
    kernels = read_traces([own / "run_kernel_trace.csv"]).totals
    assert (kernels.launches.kernels, kernels.kernels_run, kernels.syncs.total) == (None, 8, None)
    copies = read_traces([own / "run_memory_copy_trace.csv"]).totals
    assert (copies.copies.d2h, copies.copies.h2d, copies.syncs.total) == (1, 1, None)


def test_nsys_joins_within_a_process_only(own):
    report = read_traces([own / "two_processes.sqlite"])
    assert [figures(step) for step in report.steps] == [(0, "decode", 0, 2, 1, 0), (1, "decode", 1, 2, 1, 0)]
    assert report.totals.kernels_run == 12
    assert report.steps[1].syncs.d2h == 1
    assert [g.kernels for g in report.run_ahead.graph_launches] == [4, 4]
    assert report.source.device == "NVIDIA Test Device"


def test_a_folder_is_searched_and_files_of_one_run_are_one(own):
    report = read_traces([own])
    assert sorted(report.source.files) == sorted(
        [*RUN, "cuda_decode_rank3.json", "rocm_mixed.json.gz", "run_results.json", "two_processes.sqlite"]
    )
    assert 3 in report.source.ranks


def test_the_files_are_what_their_maker_writes(own, tmp_path):
    maker = tmp_path / "make.py"
    maker.write_text((own / "make.py").read_text())
    subprocess.run([sys.executable, maker], check=True, timeout=60)
    for path in own.iterdir():
        if path.suffix not in (".py", ".sqlite", ".gz"):
            assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name
