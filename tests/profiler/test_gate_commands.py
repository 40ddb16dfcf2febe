"""`syncfree check` and `syncfree diff`: exit codes, one line on stderr, and nothing heavy loaded."""

import json
import subprocess
import sys

import pytest
from syncfree.cli import main
from syncfree.profiler.report import Copies, Launches, Note, Report, Site, SiteStep, Step, Syncs


def step(index, d2h=0):
    return Step(
        index=index,
        batch_class="decode",
        syncs=Syncs(total=d2h, d2h=d2h, h2d=0, stream=0, device=0, event=0, memset=0, maybe=0),
        copies=Copies(d2h=d2h, h2d=0, d2d=0),
        launches=Launches(kernels=60, graphs=0, captured=0),
        duration_us=100.0,
    )


def site():
    return Site(file="/app/model.py", line=7, function="f", kind="d2h", count=1, steps=[SiteStep(0, 1, 1)])


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reports = {
        "good.json": Report(steps=[step(0), step(1)]),
        "bad.json": Report(steps=[step(0), step(1, d2h=1)], sites=[site()]),
        "unknown.json": Report(steps=[Step(index=0, batch_class="decode")], notes=[Note(kind="device", text="a CPU")]),
        "empty.json": Report(),
    }
    for name, report in reports.items():
        (tmp_path / name).write_bytes(report.to_json())
    (tmp_path / "cut.json").write_text('{"format": "syncfree.report/1", "steps": [')
    (tmp_path / "budget.toml").write_text("[budget.decode]\nsyncs = 0\nlaunches = 60\n")
    (tmp_path / "wrong.toml").write_text("[budget.decode]\nsync = 0\n")
    (tmp_path / "expired.toml").write_text("[[allow]]\nsite='a.py:f'\nreason='r'\nuntil=2020-01-01\n")
    (tmp_path / "allow.toml").write_text("\ufeff[[allow]]\nsite='a.py:f'\nreason='r'\n", encoding="utf-8")
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    return tmp_path


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code or 0, *capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ("good.json --budget budget.toml", 0, ""),
        ("good.json --fail-on decode:syncs=0 --fail-on decode:launches=60", 0, ""),
        ("bad.json --budget budget.toml", 1, "syncfree: budget exceeded: decode: syncs = 1 > 0 (max over 2 steps"),
        ("bad.json --fail-on decode:syncs=0", 1, "syncfree: budget exceeded: decode: syncs = 1 > 0"),
        (
            "good.json --budget expired.toml",
            1,
            "syncfree: allowance expired: expired.toml: allow[0]: a.py:f was allowed",
        ),
        (
            "good.json --budget wrong.toml",
            2,
            "syncfree: wrong.toml: budget.decode.sync: unknown key (did you mean syncs?)",
        ),
        ("good.json --fail-on decode", 2, "syncfree: --fail-on 'decode': expected CLASS:FIGURE=LIMIT"),
        ("good.json", 2, "syncfree: check: expected --budget FILE or --fail-on"),
        ("none.json --budget budget.toml", 2, "syncfree: none.json: cannot be read: No such file or directory"),
        ("cut.json --budget budget.toml", 2, "syncfree: cut.json: expected a syncfree.report/1 document"),
        (
            "unknown.json --budget budget.toml",
            4,
            "syncfree: not judged: decode: syncs: not measured: unknown in 1 of 1",
        ),
        ("good.json --fail-on extend:syncs=0", 4, "syncfree: not judged: extend: syncs: not measured: no such step"),
        ("empty.json --fail-on decode:syncs=0", 4, "syncfree: "),
        ("other.json --fail-on decode:syncs=0", 2, "syncfree: other.json: expected a syncfree.report/1 document"),
        ("good.json --budget allow.toml", 2, "syncfree: the budget has an allow-list only: expected a limit"),
        ("bad.json --budget allow.toml --fail-on decode:syncs=0", 1, "syncfree: budget exceeded: decode: syncs = 1"),
    ],
)
def test_check_ends_with_the_documented_code_and_one_line(files, capsys, arguments, code, line):
    ended, _, err = run(capsys, "check", *arguments.split())
    assert (ended, err.startswith(line)) == (code, True), err
    assert len(err.splitlines()) <= 1


@pytest.mark.parametrize(("limit", "code"), [(0, 1), (1, 0)])
def test_a_trace_printed_as_json_is_judged_in_one_line(files, capsys, limit, code):
    events = [("user_annotation", "ProfilerStep#0", 0, 9), ("cuda_runtime", "cudaDeviceSynchronize", 1, 2)]
    events = [{"ph": "X", "cat": c, "name": n, "ts": ts, "dur": dur, "tid": 1} for c, n, ts, dur in events]
    (files / "trace.json").write_text(json.dumps({"traceEvents": events}))
    ended, out, err = run(capsys, "trace", "trace.json", "--json", "--fail-on", f"unknown:syncs={limit}")
    assert (ended, json.loads(out)["totals"]["syncs"]["device"]) == (code, 1)
    assert len(err.splitlines()) == code


def test_check_names_the_line_to_blame(files, capsys):
    _, out, _ = run(capsys, "check", "bad.json", "--budget", "budget.toml")
    assert "/app/model.py:7 in f (1x)" in out
    assert "EXCEEDED" in out
    assert "kept" in out


@pytest.mark.parametrize(
    ("before", "after", "code", "line"),
    [
        ("good.json", "good.json", 0, ""),
        ("bad.json", "good.json", 0, ""),
        ("good.json", "bad.json", 1, "syncfree: 3 worse, 0 better"),
        ("good.json", "none.json", 2, "syncfree: none.json: cannot be read"),
        ("good.json", "unknown.json", 4, "syncfree: nothing could be compared"),
        ("good.json", "empty.json", 4, "syncfree: nothing could be compared"),
    ],
)
def test_diff_ends_with_the_documented_code_and_one_line(files, capsys, before, after, code, line):
    ended, _, err = run(capsys, "diff", before, after)
    assert (ended, err.startswith(line)) == (code, True), err
    assert len(err.splitlines()) <= 1


def test_diff_prints_markdown_and_json(files, capsys):
    code, out, _ = run(capsys, "diff", "good.json", "bad.json", "--markdown")
    assert code == 1
    assert out.startswith("### syncfree")
    code, out, _ = run(capsys, "diff", "good.json", "bad.json", "--json")
    assert code == 1
    assert {c["figure"] for c in json.loads(out)["changes"] if c["direction"] == "worse"} == {"syncs", "copies"}


@pytest.mark.parametrize("arguments", ["check good.json --budget budget.toml", "diff good.json good.json", "--help"])
def test_none_of_them_loads_torch(files, arguments):
    code = (
        "import sys\nfrom syncfree.cli import main\n"
        f"try:\n    main({arguments.split()!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules and 'numpy.random' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=files, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_a_count_below_zero_is_no_report(files, capsys):
    text = (files / "bad.json").read_text().replace('"total":1', '"total":-1')
    (files / "negative.json").write_text(text)
    code, _, error = run(capsys, "check", "negative.json", "--fail-on", "decode:syncs=0")
    assert code == 2
    assert ">= 0 - at `$.steps[" in error
