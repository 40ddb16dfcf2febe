"""Which files are read, in what order, as which rank."""

import gzip
import os

import pytest
from syncfree.planner.errors import BadInput
from syncfree.profiler.readers import read_traces
from syncfree.profiler.readers.find import find_sources, rank_in_name
from syncfree.profiler.report import Report


def trace(kineto, name, rank=None, launches=1):
    kineto.events = []
    kineto.fields = {} if rank is None else {"distributedInfo": {"rank": rank}}
    kineto.step("ProfilerStep#0", 0, 100)
    for i in range(launches):
        kineto.call("cudaLaunchKernel", 10 + i, 1, i + 1)
    (kineto.folder / name).parent.mkdir(parents=True, exist_ok=True)
    return kineto.write(name)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank0.1753.pt.trace.json.gz", 0),
        ("dp_rank_12.json", 12),
        ("inference_rank_1.json.gz", 1),
        ("Rank3.json", 3),
        ("1782843274.77-TP-0-DECODE.trace.json.gz", 0),
        ("1782843274.77-TP-7-EP-3.trace.json.gz", 7),
        ("ranking.json", None),
        ("frank2.json", None),
        ("http-4.json", None),
        ("trace.json", None),
    ],
)
def test_ranks_in_names(tmp_path, name, rank):
    assert rank_in_name(tmp_path / name) == rank


def test_a_rank_in_the_file_goes_before_one_in_its_name_and_the_rest_is_numbered(kineto):
    files = [
        trace(kineto, "a.json"),
        trace(kineto, "rank7.json", rank=0),
        trace(kineto, "rank5.json"),
        trace(kineto, "b.json"),
    ]
    report = read_traces(files)
    assert [step.rank for step in report.steps] == [0, 1, 2, 5]
    assert report.source.ranks == [0, 1, 2, 5]
    assert report.totals.launches.kernels == 4


def test_two_files_of_one_rank_are_counted_on(kineto):
    files = [trace(kineto, "a.json", rank=3, launches=1), trace(kineto, "b.json", rank=3, launches=2)]
    report = read_traces(files)
    assert [(step.rank, step.index, step.launches.kernels) for step in report.steps] == [(3, 0, 1), (3, 1, 2)]


def test_folders_are_searched_below_and_each_file_is_read_once(kineto):
    path = trace(kineto, "deep/er/rank1.json.gz", rank=1)
    trace(kineto, "deep/rank0.json", rank=0)
    (kineto.folder / "deep" / "notes.txt").write_text("no trace")
    (kineto.folder / "deep" / "config.json").write_text('{"no": "trace"}')
    (kineto.folder / "deep" / ".hidden.json").write_text("{")
    report = read_traces([kineto.folder / "deep", path])
    assert sorted(report.source.files) == ["rank0.json", "rank1.json.gz"]
    assert [note.file for note in report.notes if "passed over" in note.text] == ["config.json"]
    assert not report.source.partial


def test_a_broken_file_is_refused_if_named_and_told_if_found(kineto):
    trace(kineto, "ranks/rank0.json", rank=0)
    broken = kineto.folder / "ranks" / "rank1.json"
    broken.write_text('{"traceEvents": [{"a" 5}]}')
    report = read_traces([broken.parent])
    assert any("passed over" in note.text and "malformed JSON" in note.text for note in report.notes)
    assert report.source.partial
    with pytest.raises(BadInput, match="malformed JSON"):
        read_traces([broken])


def test_a_process_without_a_device_does_not_make_totals_unknown(kineto):
    worker = trace(kineto, "rank0.json", rank=0)
    kineto.events = []
    frontend = kineto.event("cpu_op", "aten::add", 0, 5).write("frontend.json")
    assert read_traces([worker, frontend]).totals.launches.kernels == 1
    assert read_traces([frontend]).totals.launches.kernels is None


def test_a_process_whose_calls_are_unknown_does(kineto):
    worker = trace(kineto, "rank0.json", rank=0)
    kineto.events = []
    other = kineto.kernel(0, 5, 1).write("rank1.json")
    totals = read_traces([worker, other]).totals
    assert (totals.launches.kernels, totals.kernels_run) == (None, None)


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.nsys-rep", b"\x00\x01", "nsys export --type sqlite"),
        ("a.pftrace", b"\x0a\x01", "rocprofv3 --output-format"),
        ("a.png", b"\x89PNG\r\n", "begins with"),
        ("a.csv", b"x,y\n1,2\n", "begins with"),
    ],
)
def test_what_is_no_trace_says_how_to_get_one(tmp_path, name, data, why):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(BadInput, match=why):
        find_sources([path])


def test_nothing_and_an_empty_folder_are_refused(tmp_path):
    with pytest.raises(BadInput, match="found none"):
        read_traces([tmp_path])
    with pytest.raises(BadInput, match="got none"):
        read_traces([])
    with pytest.raises(BadInput, match="No such file"):
        read_traces([tmp_path / "missing.json"])


def test_a_name_that_is_no_utf8_is_written_all_the_same(tmp_path):
    trace = b'{"traceEvents": [{"ph": "X", "cat": "cuda_runtime", "name": "cudaFree", "ts": 1, "dur": 1, "tid": 1}]}'
    for name, data in ((b"a\xff.json", trace), (b"b\xff.json", b"{}")):
        (tmp_path / os.fsdecode(name)).write_bytes(data)
    report = read_traces([tmp_path])
    assert report.source.files == ["a\N{REPLACEMENT CHARACTER}.json"]
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("t.json", b'{"Type":127,"CudaEvent":{"startNs":"1"}}\n{"TraceProcessEvent":{"name":"0"}}\n', "--type sqlite"),
        ("t.sqlite.gz", gzip.compress(b"SQLite format 3\0" + bytes(200), mtime=0), "gunzip it first"),
    ],
)
def test_other_shapes_of_a_trace_are_refused_with_the_way_out(tmp_path, name, data, why):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(BadInput, match=why):
        read_traces([path])
