"""Kineto traces: what their records mean, and what is done about odd ones."""

import gzip
import json
import re

import pytest
from syncfree.planner.errors import BadInput
from syncfree.profiler.readers import Limits, nothing_measured, read_traces
from syncfree.profiler.readers.kineto import nanoseconds


def one_decode(kineto):
    """A step with a launch, a graph launch and a copy that is waited for."""
    kineto.step("ProfilerStep#1", 0, 1000)
    kineto.call("cudaLaunchKernel", 10, 5, 1).kernel(20, 10, 1)
    kineto.call("cudaGraphLaunch", 30, 10, 2).kernel(50, 5, 2).kernel(60, 5, 2)
    kineto.call("cudaMemcpyAsync", 70, 5, 3).copy(75, 1, 3, "Memcpy DtoH (Device -> Pageable)", bytes=8)
    kineto.call("cudaStreamSynchronize", 80, 100, 4)
    return kineto


def told(report):
    t = report.totals
    return t.launches.kernels, t.launches.graphs, t.kernels_run, t.syncs.total, t.syncs.d2h


WHOLE = (1, 1, 3, 1, 1)


def notes(report):
    return " | ".join(note.text for note in report.notes)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "anything.txt"])
@pytest.mark.parametrize("indent", [None, 2])
def test_plain_and_packed(kineto, name, indent):
    report = read_traces([one_decode(kineto).write(name, indent=indent)])
    assert told(report) == WHOLE
    assert (report.steps[0].syncs.total, report.steps[0].duration_us) == (1, 1000.0)
    assert not report.source.partial


def test_the_array_alone_and_fields_behind_the_events(kineto, tmp_path):
    one_decode(kineto)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(kineto.events))
    assert told(read_traces([path])) == WHOLE
    device = {"deviceProperties": [{"id": 0, "name": ""}, {"id": 1, "name": "AMD Instinct"}]}
    path.write_text(json.dumps({"traceEvents": kineto.events, **device, "distributedInfo": {"rank": 5}}))
    report = read_traces([path])
    assert (told(report), report.source.device, report.source.ranks) == (WHOLE, "AMD Instinct", [5])
    path.write_text(json.dumps({"metadata": {"traceEvents": [1]}, "traceEvents": kineto.events}))
    assert told(read_traces([path])) == WHOLE


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("12", 12_000),
        ("6520618853487.683", 6520618853487683),
        ("1712345678901234.567", 1712345678901234567),  # no float holds this
        ("1.5", 1500),
        ("-2.25", -2250),
        ("1.5e3", 1_500_000),
        ("0.30000000000000004", 300),
        ('"12"', None),
        ("null", None),
        ("[]", None),
        ("1e400", None),
        ("", None),
    ],
)
def test_times_are_exact(text, ns):
    assert nanoseconds(text.encode()) == ns


def test_a_step_is_closed_at_its_begin_and_open_at_its_end(kineto):
    base = 1712345678901234
    kineto.events.append(
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#0", "pid": 1, "tid": 1, "ts": 0, "dur": 0}
    )
    text = kineto.text()
    calls = [f"{base}.566", f"{base}.567", f"{base + 100}.067", f"{base + 100}.068"]
    events = [
        f'{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 9, "ts": {ts}, "dur": 1}}'
        for ts in calls
    ]
    text = text.replace('"ts": 0, "dur": 0', f'"ts": {base}.567, "dur": 99.501').replace(
        "]}", ", " + ", ".join(events) + "]}"
    )
    (kineto.folder / "t.json").write_text(text)
    report = read_traces([kineto.folder / "t.json"])
    assert report.steps[0].launches.kernels == 2  # the second and the third
    assert report.steps[0].duration_us == 99.501


@pytest.mark.parametrize(
    ("call", "kernel", "copy", "memset", "annotation"),
    [
        ("cuda_runtime", "kernel", "gpu_memcpy", "gpu_memset", "user_annotation"),
        ("Runtime", "Kernel", "Memcpy", "Memset", "Operator"),
        ("cuda_driver", "kernel", "gpu_memcpy", "gpu_memset", "cpu_op"),
    ],
)
def test_categories_of_all_ages(kineto, call, kernel, copy, memset, annotation):
    kineto.event(annotation, "ProfilerStep#3", 0, 100, tid="17")
    kineto.event(call, "cudaLaunchKernel", 5, 1, tid="17", correlation=1)
    kineto.kernel(9, 1, 1, cat=kernel)
    kineto.event(call, "cudaMemcpyAsync", 20, 1, tid="17", correlation=2)
    kineto.kernel(25, 1, 2, "Memcpy HtoD (Pageable -> Device)", copy, bytes=4)
    kineto.event(call, "cudaStreamSynchronize", 21, 5, tid="17", correlation=3)
    kineto.event(call, "cudaMemsetAsync", 40, 1, tid="17", correlation=4)
    kineto.kernel(45, 1, 4, "Memset (Device)", memset)
    kineto.event("cuda_sync", "Stream Sync", 26, 1, correlation=3)
    kineto.event("gpu_user_annotation", "ProfilerStep#3", 9, 30)
    (step,) = read_traces([kineto.write()]).steps
    assert (step.launches.kernels, step.syncs.total, step.syncs.h2d, step.copies.h2d) == (1, 1, 1, 1)


def test_the_kind_of_a_hip_call_is_believed_and_not_the_record(kineto):
    for number, kind in enumerate(("1", 2, "3", "hipMemcpyHostToDevice", "4")):
        kineto.call("hipMemcpyAsync", 10 * number, 1, number + 1, kind=kind, bytes="16")
        kineto.copy(10 * number + 2, 1, number + 1, "Memcpy DtoD (Device -> Device)", kind="DtoD")
    report = read_traces([kineto.write()])
    copies = report.totals.copies
    assert (copies.h2d, copies.d2h, copies.d2d) == (2, 1, 2)  # kind 4 is "default": there the record is all there is
    assert "2 copies are d2d by the device record, h2d by the call" in notes(report)


def test_a_lone_blocking_copy_is_a_sync_and_a_pageable_one_too(kineto):
    kineto.call("hipMemcpyWithStream", 10, 400, 1, kind="2", bytes="4")
    kineto.call("cudaMemcpyAsync", 500, 90, 2).copy(550, 1, 2, "Memcpy DtoH (Device -> Pageable)", bytes=4)
    kineto.call("cudaLaunchKernel", 600, 1, 3)
    kineto.call("cudaMemcpyAsync", 700, 1, 4).copy(702, 1, 4, "Memcpy DtoH (Device -> Pinned)", bytes=4)
    syncs = read_traces([kineto.write()]).totals.syncs
    assert (syncs.total, syncs.d2h) == (2, 2)


def test_a_copy_of_unknown_direction_leaves_both_unknown(kineto):
    kineto.call("cudaMemcpyAsync", 10, 1, 1).call("cudaStreamSynchronize", 12, 1, 2)
    totals = read_traces([kineto.write()]).totals
    assert (totals.syncs.total, totals.syncs.d2h, totals.syncs.h2d, totals.copies.d2h) == (1, None, None, None)


def test_records_that_are_not_there_are_unknown_and_not_zero(kineto):
    kineto.step("ProfilerStep#0", 0, 100).event("cpu_op", "aten::add", 1, 2)
    report = read_traces([kineto.write()])
    assert told(report) == (None, None, None, None, None)
    assert (report.steps[0].host_ops, report.steps[0].syncs.total) == (1, None)
    assert nothing_measured(report) is None
    assert report.classes["unknown"].verdict == "unknown"
    kineto.call("cudaLaunchKernel", 10, 1, 1)
    assert told(read_traces([kineto.write()])) == (1, 0, None, 0, 0)


def test_an_empty_trace_measures_nothing(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": []}')
    reason = nothing_measured(read_traces([path]))
    assert reason == "t.json: no step, runtime call or device record found"


def test_calls_recorded_into_a_graph_did_not_run(kineto):
    kineto.step("capture_8_DECODE", 0, 100)
    kineto.call("cudaLaunchKernel", 5, 1, 1).kernel(8, 1, 1)  # before the capture begins: runs
    kineto.call("cudaStreamBeginCapture_v10000", 10, 1, 2)
    kineto.call("cudaLaunchKernel", 12, 1, 3).call("cudaMemcpyAsync", 14, 1, 4)
    kineto.call("cudaLaunchKernel", 16, 1, 5, tid=2)  # another thread, in the capture range, without a record
    kineto.call("cudaStreamEndCapture", 20, 1, 6)
    kineto.step("ProfilerStep#1", 200, 100)
    kineto.call("cudaLaunchKernel", 210, 1, 7)  # no record either, but nothing says that it was captured
    report = read_traces([kineto.write()])
    launches = report.totals.launches
    assert (launches.kernels, launches.captured, report.totals.kernels_run) == (2, 2, 1)
    assert [step.warmup_cause for step in report.steps] == ["capture", ""]
    assert list(report.classes) == ["unknown"]


def test_stacks_of_python_frames(kineto):
    kineto.event("python_function", "/app/serve.py(10): main", 0, 100)
    kineto.event("python_function", "torch/_tensor.py(5): item", 40, 30)
    kineto.event("python_function", "threading.py(900): run", 41, 29)
    kineto.event("python_function", "<built-in method item of Tensor object at 0x1>", 42, 27)
    kineto.event("python_function", "/app/serve.py(99): other", 0, 100, tid=2)
    kineto.event("python_function", "/app/serve.py(77): later", 71, 20)
    kineto.call("hipMemcpyWithStream", 45, 5, 1, kind="2", bytes="4")
    (site,) = read_traces([kineto.write()]).sites
    assert (site.file, site.line, site.function) == ("/app/serve.py", 10, "main")
    assert site.stack == [
        "<built-in>:0 built-in method item of Tensor object at 0x1",
        "<stdlib>/threading.py:900 run",
        "torch/_tensor.py:5 item",
        "/app/serve.py:10 main",
    ]


def test_operators_name_a_site_where_there_are_no_frames(kineto):
    kineto.event("cpu_op", "MyModule", 0, 100).event("cpu_op", "aten::item", 10, 80)
    kineto.event("cpu_op", "aten::_local_scalar_dense", 20, 60)
    kineto.call("hipMemcpyWithStream", 45, 5, 1, kind="2", bytes="4")
    (site,) = read_traces([kineto.write()]).sites
    assert (site.function, site.line) == ("aten::item", 0)


def test_operators_of_2021_carry_their_stack_as_text(kineto):
    stack = "resnet.py(44): forward;torch/nn/modules/module.py(1051): _call_impl;train.py(9): <module>"
    kineto.event("Operator", "aten::item", 10, 80, **{"Call stack": stack})
    kineto.event("Runtime", "cudaStreamSynchronize", 45, 5)
    (site,) = read_traces([kineto.write()]).sites
    assert (site.file, site.line, site.function) == ("resnet.py", 44, "forward")


def test_polls_and_device_waits_are_counted_by_name_only(kineto):
    for i in range(50):
        kineto.call("cudaEventQuery", i, 0)
    kineto.call("cudaStreamWaitEvent", 60, 1).call("INVALID", 61, 0).call("cudaFuncSetAttribute", 62, 1)
    report = read_traces([kineto.write()])
    assert told(report)[:2] == (0, 0)
    assert report.totals.syncs.total == 0
    assert report.totals.api == {
        "cudaEventQuery": 50,
        "cudaStreamWaitEvent": 1,
        "INVALID": 1,
        "cudaFuncSetAttribute": 1,
    }
    assert "50 x cudaEventQuery" in notes(report)


MUTATIONS = {
    "a time that is NaN": lambda t: re.sub(r'"ts": 10,', '"ts": NaN,', t),
    "a time that is text": lambda t: re.sub(r'"ts": 10,', '"ts": "soon",', t),
    "a time that is an object": lambda t: re.sub(r'"ts": 10,', '"ts": {"a": [1]},', t),
    "a missing time": lambda t: re.sub(r'"ts": 10, ', "", t),
    "a time beyond all times": lambda t: re.sub(r'"ts": 10,', '"ts": 99999999999999999999999,', t),
    "args that are a list": lambda t: t.replace('"args": {"correlation": 1}', '"args": [1, 2]', 1),
    "args that are text": lambda t: t.replace('"args": {"correlation": 1}', '"args": "x"', 1),
    "a correlation that is an object": lambda t: t.replace('"correlation": 1}', '"correlation": {"a": 1}}', 1),
    "a number for a name": lambda t: t.replace('"name": "cudaLaunchKernel"', '"name": 5', 1),
    "a number for a category": lambda t: t.replace('"cat": "cuda_runtime"', '"cat": 7', 1),
    "an event that is none": lambda t: t.replace('"traceEvents": [', '"traceEvents": [5, null, "x", [], {}, ', 1),
    "a trailing comma": lambda t: t.replace("]}", ",]}"),
    "infinity in a field that is skipped": lambda t: t.replace('"bytes": 8', '"bytes": 8, "bandwidth": Infinity'),
    "broken characters": lambda t: t.replace('"name": "kernel"', '"name": "k\\q\x01ernel"'),
    "durations below zero": lambda t: t.replace('"dur": ', '"dur": -'),
    "no durations": lambda t: re.sub(r'"dur": \d+, ', "", t),
    "ids that repeat": lambda t: re.sub(r'"correlation": \d+', '"correlation": 1', t),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_odd_records_give_a_report_with_a_note(kineto, name):
    text = one_decode(kineto).text()
    mutated = MUTATIONS[name](text)
    assert mutated != text
    path = kineto.folder / "t.json"
    path.write_text(mutated)
    report = read_traces([path])
    report.from_json(report.to_json())
    said = [note for note in report.notes if note.kind == "input" and "no step annotation" not in note.text]
    assert said, "nothing was said about it"
    assert report.totals.kernels_run in (2, 3)
    assert report.totals.launches.kernels in (0, 1)


def test_a_negative_duration_is_unknown_and_the_call_still_counts(kineto):
    kineto.call("cudaStreamSynchronize", 10, -5)
    report = read_traces([kineto.write()])
    assert (report.totals.syncs.total, report.sites[0].blocked_us) == (1, None)
    assert "1 x an impossible duration" in notes(report)


@pytest.mark.parametrize("cut", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("packed", [False, True])
def test_a_cut_file_is_partial(kineto, cut, packed):
    for i in range(2000):
        kineto.call("cudaLaunchKernel", 10 * i, 1, i + 1, filler=str(i * 7919))
    data = kineto.text().encode()
    data = gzip.compress(data, mtime=0) if packed else data
    path = kineto.folder / "t.json"
    path.write_bytes(data[: int(len(data) * cut)])
    report = read_traces([path])
    assert 0 < report.totals.launches.kernels < 2000
    assert report.source.partial
    assert "ends early" in notes(report)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "an empty file"),
        (b"   \n ", "an empty file"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 100, "got something that begins with"),
        (b'{"a": 1}', "found none"),
        (b'{"traceEvents": null}', "found none"),
        (b'{"traceEvents": {"a": 1}}', "found none"),
        (b'{"traceEvents": [{"ph": "X" "cat": 1}]}', "malformed JSON at byte"),
        (gzip.compress(b"hello", mtime=0), "got something that begins with"),
        (b"\x1f\x8b\x08garbage that is no gzip stream", "cannot be unpacked"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path, data, why):
    path = tmp_path / "t.json"
    path.write_bytes(data)
    with pytest.raises(BadInput, match=why) as error:
        read_traces([path])
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_kept_is_bounded(kineto):
    for i in range(3000):
        kineto.call("cudaLaunchKernel", i, 1, i + 1)
    with pytest.raises(BadInput, match=r"at most 0 MiB are kept, got more \(0 device records, 3,000 calls"):
        read_traces([kineto.write()], limits=Limits(kept=500_000))


def test_named_ranges_that_are_not_there_are_refused_with_what_there_is(kineto):
    one_decode(kineto).step("my range", 5, 50)
    with pytest.raises(BadInput, match=r"named nothing, found none: there are ProfilerStep#1, my range"):
        read_traces([kineto.write()], steps="nothing")
    assert [step.name for step in read_traces([kineto.write()], steps="my *").steps] == ["my range"]
    assert read_traces([kineto.write()], steps="none").steps == []


def test_overlapping_steps_each_count_what_lies_in_their_window(kineto):
    kineto.step("ProfilerStep#0", 0, 100, tid=1).step("ProfilerStep#1", 50, 100, tid=2)
    for at, thread in ((10, 1), (60, 1), (70, 2), (120, 2)):
        kineto.call("cudaLaunchKernel", at, 1, at, tid=thread)
    report = read_traces([kineto.write()])
    assert [step.launches.kernels for step in report.steps] == [3, 3]
    assert report.totals.launches.kernels == 4


def test_a_byte_order_mark_costs_nothing(kineto):
    kineto.fields["distributedInfo"] = {"rank": 3}
    path = one_decode(kineto).write()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    report = read_traces([path])
    assert (told(report), report.source.ranks) == (WHOLE, [3])
    assert "passed over" not in notes(report)


def test_numbers_in_quotes_are_numbers(kineto):
    path = one_decode(kineto).write()
    path.write_text(re.sub(r'"(ts|dur)": ([\d.]+)', r'"\1": "\2"', path.read_text()))
    report = read_traces([path])
    assert (told(report), report.steps[0].syncs.total, report.steps[0].duration_us) == (WHOLE, 1, 1000.0)
    assert "a time in quotes, read as a number" in notes(report)


@pytest.mark.parametrize("kind", [2, 2.0, "2", "hipMemcpyDeviceToHost"])
def test_the_copy_calls_own_argument_in_its_spellings(kineto, kind):
    kineto.call("hipMemcpyWithStream", 10, 5, 1, kind=kind).copy(11, 1, 1, "Memcpy DtoD (Device -> Device)")
    assert read_traces([kineto.write()]).totals.syncs.d2h == 1


def test_copy_names_of_the_first_roctracer(kineto):
    kineto.call("hipMemcpyWithStream", 10, 5, 1).copy(11, 1, 1, "CopyHostToDevice")
    kineto.call("hipMemcpyWithStream", 20, 5, 2).copy(21, 1, 2, "CopyDeviceToHost")
    syncs = read_traces([kineto.write()]).totals.syncs
    assert (syncs.h2d, syncs.d2h) == (1, 1)


def test_figures_of_overlapping_steps_stay_with_their_step(kineto):
    kineto.step("ProfilerStep#0", 0, 100).step("ProfilerStep#1", 50, 100, tid=2).step("ProfilerStep#2", 200, 100)
    kineto.call("cudaLaunchKernel", 10, 1, 1).kernel(12, 5, 1)  # lead 1
    kineto.call("cudaLaunchKernel", 120, 1, 2, tid=2).kernel(123, 5, 2)  # lead 2
    kineto.call("cudaLaunchKernel", 210, 1, 3).kernel(214, 5, 3)  # lead 3
    kineto.call("cudaStreamSynchronize", 220, 1, 4)
    report = read_traces([kineto.write()])
    assert [(s.index, s.name, s.launches.kernels, s.launch_lead_us) for s in report.steps] == [
        (0, "ProfilerStep#0", 1, 1.0),
        (1, "ProfilerStep#1", 1, 2.0),
        (2, "ProfilerStep#2", 1, 3.0),
    ]
    (site,) = report.sites
    assert [(at.index, at.count) for at in site.steps] == [(2, 1)]
    assert [span.step for span in report.timeline] == [2]


@pytest.mark.parametrize("devices", [5, "H200", {"name": "H200"}, [None, "H200"]])
def test_odd_device_lists_name_no_device(kineto, devices):
    one_decode(kineto).fields["deviceProperties"] = devices
    report = read_traces([kineto.write()])
    assert told(report) == WHOLE
    assert report.source.device is None


def test_a_negative_rank_is_none(kineto):
    one_decode(kineto).fields["distributedInfo"] = {"rank": -1}
    assert read_traces([kineto.write()]).source.ranks == [0]


def test_an_event_nested_too_deep_is_malformed(kineto):
    one_decode(kineto)
    path = kineto.write()
    deep = b',{"ph":"X","args":' + b"[" * 3000 + b"]" * 3000 + b"}]}"
    path.write_bytes(path.read_bytes()[:-2] + deep)
    with pytest.raises(BadInput, match="nested too deep"):
        read_traces([path])


def test_fractions_of_a_nanosecond_do_not_move_a_call_into_another_step(kineto):
    kineto.step("ProfilerStep#0", 0, 100.0003).step("ProfilerStep#1", 100.0003, 50.0001)
    kineto.call("cudaLaunchKernel", 100.0, 1, 1).call("cudaLaunchKernel", 150.0, 1, 2)
    report = read_traces([kineto.write()])
    assert [step.launches.kernels for step in report.steps] == [1, 1]


@pytest.mark.parametrize("where", ["call", "record"])
def test_a_negative_number_of_bytes_is_unknown(kineto, where):
    size = {"bytes": -8}
    kineto.call("hipMemcpyWithStream", 10, 5, 1, kind=2, **(size if where == "call" else {}))
    kineto.copy(12, 1, 1, "Memcpy DtoH (Device -> Pinned)", **(size if where == "record" else {}))
    report = read_traces([kineto.write()])
    assert (report.totals.copies.d2h, report.totals.copies.d2h_bytes) == (1, None)
