"""`syncfree profile --verify`: two collectors on the same steps of a live server."""

import json
import subprocess
import sys

import pytest


def verify(server, *arguments):
    command = [sys.executable, "-m", "syncfree.cli", "profile", "--verify", "--steps", "12", *arguments]
    command += ["--socket", str(server.path)] if server else []
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def told(done):
    """The one line on stderr."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("syncfree:")]
    assert "Traceback" not in done.stderr
    return lines


def test_agreement_is_exit_0_with_both_columns(serve, tmp_path):
    done = verify(serve("--counted"), "--json", str(tmp_path / "r.json"))
    assert (done.returncode, told(done)) == (0, [])
    assert "probe beside kineto" in done.stdout
    assert "probe and kineto agree on all 12 steps" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    (item,) = report["verification"]
    figures = {figure["name"]: figure for figure in item["figures"]}
    assert figures["kernel launches"] == {"name": "kernel launches", "steps": 12, "differ": 0, "left": 24, "right": 24}
    assert figures["syncs"]["left"] == figures["syncs"]["right"] == 12


def test_a_difference_is_exit_1_and_names_the_figure(serve, tmp_path):
    done = verify(serve("--counted", "--kineto-misses", "10"), "--json", str(tmp_path / "r.json"))
    assert done.returncode == 1
    (line,) = told(done)
    assert line.startswith("syncfree: probe and kineto differ: ")
    assert "kernel launches" in line
    assert json.loads((tmp_path / "r.json").read_text())["verification"]


def test_calls_that_were_lost_prove_nothing(serve):
    done = verify(serve("--counted", "--kineto-misses", "10", "--probe-dies"))
    assert done.returncode == 4
    assert "could not be compared: they differ, but probe: its helper process died" in told(done)[0]


def test_a_collector_that_cannot_work_is_exit_4_with_its_reason(serve):
    pytest.importorskip("torch")
    done = verify(serve())  # the real ones, on a machine without a device
    assert (done.returncode, done.stdout) == (4, "")
    (line,) = told(done)
    assert line.startswith("syncfree: probe and kineto could not be compared: ")
    assert "collector kineto" in line or "probe:" in line


def test_a_server_that_is_not_there_is_exit_3(tmp_path):
    done = verify(None, "--socket", str(tmp_path / "1-0.sock"))
    assert done.returncode == 3


@pytest.mark.parametrize("arguments", [["--demo"], ["--collectors", "kineto"]])
def test_what_it_cannot_go_with_is_bad_usage(arguments):
    done = verify(None, *arguments)
    assert done.returncode == 2
    assert "--verify: expected a live target" in told(done)[0]
