"""The command line as a user meets it: output, exit codes, one line for what is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from syncfree.profiler import Report

ROOT = Path(__file__).resolve().parent.parent


def syncfree(*arguments, cwd=None, **more):
    command = [sys.executable, "-m", "syncfree.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=cwd, **more)


def one_line(done, code):
    assert done.returncode == code, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("syncfree: ")
    assert "Traceback" not in done.stdout
    return lines[0]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    done = syncfree("profile", "--demo", "--json", folder / "r.json", cwd=folder)
    return folder, done


def test_the_demo_shows_four_classes_for_both_builders_and_ends_well(demo):
    folder, done = demo
    assert done.returncode == 0, done.stderr
    planned, unplanned = Report.load(folder / "r.json"), Report.load(folder / "r.unplanned.json")
    classes = {"decode", "extend", "chunked_prefill", "causal_prefill"}
    assert set(planned.classes) == set(unplanned.classes) == classes
    assert {c.verdict for c in planned.classes.values()} == {"sync-free"}
    assert {c.verdict for c in unplanned.classes.values()} == {"syncs"}
    assert "engine/builders.py:" in done.stdout
    build = [site for site in unplanned.sites if site.phase == "build"]
    assert build
    assert all(Path(site.file).name == "builders.py" and site.line > 0 for site in build)


def test_the_demo_leaves_nothing_lying_about(demo):
    folder, _ = demo
    assert {p.name for p in folder.iterdir()} == {"r.json", "r.unplanned.json"}


def test_check_keeps_exceeds_and_refuses_to_guess(demo):
    folder, _ = demo
    assert syncfree("check", folder / "r.json", "--fail-on", "decode:syncs=0").returncode == 0
    exceeded = syncfree("check", folder / "r.unplanned.json", "--fail-on", "decode:syncs=0")
    assert exceeded.returncode == 1
    assert "builders.py:" in exceeded.stdout
    unknown = syncfree("check", folder / "r.json", "--fail-on", "decode:blocked_us=5")
    assert unknown.returncode == 4, unknown.stdout  # the simulated device has no waiting time


def test_a_budget_with_a_mistake_is_refused_before_anything_runs():
    line = one_line(syncfree("profile", "--demo", "--fail-on", "decode:sync=0"), 2)
    assert "sync" in line


def test_diff_tells_which_side_is_worse(demo):
    folder, _ = demo
    worse = syncfree("diff", folder / "r.json", folder / "r.unplanned.json")
    assert worse.returncode == 1
    assert "worse" in worse.stdout
    assert syncfree("diff", folder / "r.json", folder / "r.json").returncode == 0
    markdown = syncfree("diff", folder / "r.json", folder / "r.unplanned.json", "--markdown").stdout
    assert "| " in markdown


def test_profile_without_any_server_is_unreachable(tmp_path):
    done = syncfree("profile", "--seconds", "1", env={"SYNCFREE_SOCKET_DIR": str(tmp_path / "none"), "PATH": ""})
    assert "no live agent" in one_line(done, 3)


def test_profile_of_a_socket_that_is_not_there(tmp_path):
    one_line(syncfree("profile", "--socket", tmp_path / "1-0.sock", "--seconds", "1"), 3)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["profile", "--demo", "--socket", "x"], 2),
        (["profile", "--demo", "--builder", "magic"], 2),
        (["profile", "--steps", "0", "--demo"], 2),
        (["check", "nowhere.json", "--fail-on", "decode:syncs=0"], 2),
        (["check", "nowhere.json"], 2),
        (["trace", "nowhere.json"], 2),
        (["plan", "--backend", "magic", "--query-lens", "1", "--seq-lens", "1"], 2),
        (["plan", "--backend", "triton", "--query-lens", "4", "--seq-lens", "2"], 2),
        (["no-such-command"], 2),
        (["profile", "--no-such-option"], 2),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments, code, tmp_path):
    one_line(syncfree(*arguments, cwd=tmp_path), code)
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_is_one_line(tmp_path):
    line = one_line(syncfree("profile", "--demo", "--steps", "2", "--json", tmp_path / "no" / "r.json"), 2)
    assert "cannot be written" in line


def test_plan_prints_consumers_reasons_and_cost():
    done = syncfree("plan", "--backend", "aiter_fa", "--query-lens", "1,1,40", "--seq-lens", "9,70,90")
    assert done.returncode == 0
    assert "cp_mha_gather_cache" in done.stdout
    assert "left out" in done.stdout
    assert "cost: 0 syncs" in done.stdout


def test_plan_json_is_one_document():
    done = syncfree("plan", "-b", "triton", "--query-lens", "1", "--seq-lens", "9", "--json")
    assert json.loads(done.stdout)["schema"] == "syncfree.plan/1"


def test_trace_json_is_a_report_even_where_nothing_is_measured(tmp_path):
    empty = tmp_path / "t.json"
    empty.write_text('{"traceEvents": []}')
    done = syncfree("trace", empty, "--json")
    assert done.returncode == 4
    assert Report.from_json(done.stdout).steps == []


@pytest.mark.parametrize("command", ["plan", "profile", "trace", "check", "diff", "watch", "serve", "doctor"])
def test_every_command_has_help_with_an_example(command):
    done = syncfree(command, "--help")
    assert done.returncode == 0
    assert "Example" in done.stdout
    assert f"syncfree {command}" in " ".join(done.stdout.split())


def test_the_demo_without_torch_says_what_is_missing():
    code = "import sys; sys.modules['torch'] = None; from syncfree.cli import main; main(['profile', '--demo'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert "pip install torch" in one_line(done, 2)


def test_python_cli_py_is_the_same_command():
    done = subprocess.run([sys.executable, "cli.py", "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("syncfree ")


def test_a_terminal_that_has_not_every_sign_gets_the_tables_all_the_same(tmp_path, monkeypatch):
    trace = tmp_path / "t.json"
    trace.write_text('{"traceEvents": [{"ph": "X", "cat": "cuda_runtime", "name": "cudaFree", "ts": 1, "dur": 1}]}')
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = syncfree("trace", trace)
    assert (done.returncode, done.stderr) == (0, "")
    assert "collectors kineto" in done.stdout


def test_debug_shows_where():
    done = syncfree("--debug", "trace", "nowhere.json")
    assert "Traceback" in done.stderr


def test_what_cannot_be_written_costs_no_work(tmp_path):
    missing = tmp_path / "missing" / "r.html"
    for command in (["profile", "--demo"], ["trace", tmp_path / "no-trace.json"], ["diff", "a.json", "b.json"]):
        line = one_line(syncfree(*command, "--html", missing, cwd=tmp_path), 2)
        assert line == f"syncfree: {missing}: cannot be written: No such file or directory"
    hidden = "import importlib.resources as r, sys; found = r.files; "
    hidden += "r.files = lambda name: found('no.such.package' if name == 'plotly' else name); "
    hidden += (
        "from syncfree.cli import main; sys.argv = ['syncfree', 'trace', 'no-trace.json', '--html', 'r.html']; main()"
    )
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "HTML needs plotly" in one_line(done, 2)
    assert list(tmp_path.iterdir()) == []
