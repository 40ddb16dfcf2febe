"""rocprofv3's files: generations of columns, markers that look like calls, documents that are odd."""

import gzip
import json

import pytest
from syncfree.planner.errors import BadInput
from syncfree.profiler.readers import read_traces
from syncfree.profiler.readers.rocprofv3_csv import run_prefix

API = "Domain,Function,Process_Id,Thread_Id,Correlation_Id,Start_Timestamp,End_Timestamp\n"


@pytest.mark.parametrize("domain", ["HIP_RUNTIME_API", "HIP_RUNTIME_API_EXT"])
@pytest.mark.parametrize("quote", ["", '"'])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_generations_of_the_api_file(tmp_path, domain, quote, end):
    rows = [f"{domain},hipLaunchKernel,1,1,5,100,200", f"{domain},hipStreamSynchronize,1,1,6,210,300"]
    lines = [API.strip(), *rows]
    text = end.join(",".join(f"{quote}{cell}{quote}" for cell in line.split(",")) for line in lines)
    path = tmp_path / "x_hip_api_trace.csv"
    path.write_text(text, newline="")  # no newline at the end
    totals = read_traces([path]).totals
    assert (totals.launches.kernels, totals.syncs.stream) == (1, 1)


def test_a_marker_named_after_a_call_is_no_call(tmp_path):
    path = tmp_path / "x_marker_api_trace.csv"
    path.write_text(API + "MARKER_CORE_API,hipLaunchKernel,1,1,5,100,200\nMARKER_CONTROL_API,hipFree,1,1,5,1,2\n")
    report = read_traces([path], steps="hip*")
    assert report.totals.api == {}
    assert [(step.name, step.launches.kernels) for step in report.steps] == [("hipLaunchKernel", None)]


def test_rows_that_cannot_be_read_are_left_out_with_a_note(tmp_path):
    path = tmp_path / "x_hip_api_trace.csv"
    rows = [
        "HIP_RUNTIME_API,hipLaunchKernel,1,1,5,100,200",
        "HIP_RUNTIME_API,hipLaunchKernel,1",
        "HIP_RUNTIME_API,hipFree,1,1,5,soon,9",
    ]
    path.write_text(API + "\n".join(rows))
    report = read_traces([path])
    assert report.totals.launches.kernels == 1
    assert any("2 x a CSV row" in note.text for note in report.notes)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + API + "HIP_RUNTIME_API,hipLaunchKernel,1,1,5,100,200\n",
        API.replace(",", ", ") + "HIP_RUNTIME_API, hipLaunchKernel, 1, 1, 5, 100, 200\n",
        API + "HIP_RUNTIME_API,hipLaunchKernel,1,1,5.0,100.0,2E+2\n",
    ],
    ids=["byte order mark", "spaces", "numbers of a spreadsheet"],
)
def test_what_other_tools_make_of_the_file(tmp_path, text):
    path = tmp_path / "x_hip_api_trace.csv"
    path.write_text(text, encoding="utf-8")
    report = read_traces([path])
    assert report.totals.api == {"hipLaunchKernel": 1}
    assert report.totals.launches.kernels == 1
    assert not any("left out" in note.text for note in report.notes)


def test_capital_names_are_one_run_too(tmp_path):
    (tmp_path / "RUN_HIP_API_TRACE.CSV").write_text(API + "HIP_RUNTIME_API,hipMemcpyWithStream,1,1,5,100,200\n")
    copies = "Kind,Direction,Correlation_Id,Start_Timestamp,End_Timestamp\n"
    (tmp_path / "RUN_MEMORY_COPY_TRACE.CSV").write_text(copies + "MEMORY_COPY,DEVICE_TO_HOST,5,110,190\n")
    report = read_traces([tmp_path])
    assert (report.source.ranks, report.totals.syncs.d2h) == ([0], 1)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("bench_hip_api_trace.csv", "bench"),
        ("bench_kernel_trace.csv.gz", "bench"),
        ("123_marker_api_trace.csv", "123"),
        ("hip_runtime_trace.csv", ""),
        ("a_b_memory_copy_trace.csv", "a_b"),
        ("other.csv", "other"),
    ],
)
def test_files_of_one_run_have_one_prefix(name, prefix, tmp_path):
    assert run_prefix(tmp_path / name) == prefix


def test_two_runs_in_one_folder_stay_two(tmp_path, own):
    for run in ("a", "b"):
        for kind in ("hip_api", "kernel", "marker_api"):
            (tmp_path / f"{run}_{kind}_trace.csv").write_text((own / f"run_{kind}_trace.csv").read_text())
    report = read_traces([tmp_path], steps="decode *")
    assert [(step.rank, step.index) for step in report.steps] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert report.totals.kernels_run == 16


def document(own):
    return json.loads((own / "run_results.json").read_text())


def read(tmp_path, doc, **more):
    path = tmp_path / "r.json.gz"
    path.write_bytes(gzip.compress(json.dumps(doc).encode(), mtime=0))
    return read_traces([path], **more)


def test_lists_that_are_empty_were_not_recorded(tmp_path, own):
    doc = document(own)
    doc["rocprofiler-sdk-tool"][0]["buffer_records"] |= {"hip_api": [], "memory_copy": [], "marker_api": []}
    totals = read(tmp_path, doc).totals
    assert (totals.kernels_run, totals.launches.kernels, totals.syncs.total, totals.copies.d2h) == (8, None, None, None)


def test_several_processes_are_ranks(tmp_path, own):
    doc = document(own)
    doc["rocprofiler-sdk-tool"] *= 2
    report = read(tmp_path, doc, steps="decode *")
    assert report.source.ranks == [0, 1]
    assert report.totals.kernels_run == 16


def test_numbers_out_of_range_name_nothing(tmp_path, own):
    doc = document(own)
    process = doc["rocprofiler-sdk-tool"][0]
    process["buffer_records"]["hip_api"][0] |= {"kind": 99, "operation": -1}
    process["kernel_symbols"] = []
    report = read(tmp_path, doc)
    assert report.totals.launches.kernels == 1
    assert report.totals.api["operation -1"] == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda p: p["buffer_records"]["hip_api"][0].pop("start_timestamp"),
            "missing required field `start_timestamp`",
        ),
        (lambda p: p["buffer_records"]["kernel_dispatch"][0].update(start_timestamp="x"), "Expected `int`, got `str`"),
        (lambda p: p.update(buffer_records=5), "Expected `object`, got `int`"),
    ],
)
def test_a_wrong_document_is_refused_with_the_place(tmp_path, own, change, why):
    doc = document(own)
    change(doc["rocprofiler-sdk-tool"][0])
    with pytest.raises(BadInput, match=why) as error:
        read(tmp_path, doc)
    assert "rocprofiler-sdk-tool" in str(error.value)


@pytest.mark.parametrize(
    "text", ['{"rocprofiler-sdk-tool": []}', '{"rocprofiler-sdk-tool": [{"a"', '{"rocprofiler-sdk-tool": 5}']
)
def test_documents_without_a_process_are_refused(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=str(path)):
        read_traces([path])


def test_calls_of_the_compilers_own_tell_nothing_of_launches(tmp_path):
    path = tmp_path / "x_hip_api_trace.csv"
    path.write_text(API + "HIP_COMPILER_API_EXT,__hipPushCallConfiguration,1,1,5,100,200\n")
    totals = read_traces([path]).totals
    assert totals.launches.kernels is None
    assert totals.api == {"__hipPushCallConfiguration": 1}


def hip_document(operation, kind="HIP_RUNTIME_API", operations=("hipLaunchKernel",)):
    call = {"kind": 0, "operation": operation, "start_timestamp": 1, "end_timestamp": 2, "thread_id": 3}
    names = [{"kind": kind, "operations": list(operations)}]
    process = {"strings": {"buffer_records": names}, "buffer_records": {"hip_api": [call]}}
    return json.dumps({"rocprofiler-sdk-tool": [process]})


@pytest.mark.parametrize(
    ("document", "launches"),
    [
        (hip_document(0), 1),
        (hip_document(7), None),
        (hip_document(0, operations=()), None),
        (hip_document(0, "HIP_COMPILER_API", ["__hipPushCallConfiguration"]), None),
    ],
    ids=["named", "number beyond the names", "no names", "compiler"],
)
def test_calls_without_names_are_unknown_not_none(tmp_path, document, launches):
    path = tmp_path / "x_results.json"
    path.write_text(document)
    assert read_traces([path]).totals.launches.kernels == launches


def test_processes_of_one_document_were_recorded_alike(tmp_path):
    one, other = (json.loads(hip_document(0))["rocprofiler-sdk-tool"][0] for _ in range(2))
    kernel = {"start_timestamp": 3, "end_timestamp": 4, "correlation_id": {"internal": 0}}
    one["buffer_records"]["kernel_dispatch"] = [kernel]
    path = tmp_path / "x_results.json"
    path.write_text(json.dumps({"rocprofiler-sdk-tool": [one, other]}))
    totals = read_traces([path]).totals
    assert (totals.launches.kernels, totals.kernels_run) == (2, 1)
