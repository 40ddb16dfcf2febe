"""The sample repo: its tests, its budget and its CI job, run as a stranger would."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from syncfree.profiler.budget import load_budget

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_repo"


@pytest.fixture
def repo(tmp_path):
    pytest.importorskip("torch")
    return shutil.copytree(EXAMPLE, tmp_path / "repo", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))


def run(repo, *command):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True, timeout=240)


def outcomes(result):
    return {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", result.stdout)}


def job_commands():
    job = yaml.safe_load((EXAMPLE / ".github" / "workflows" / "sync-free.yml").read_text())["jobs"]["sync-free"]
    return {step["name"]: step["run"] for step in job["steps"] if "run" in step}


def test_the_job_fails_on_the_regression_and_names_its_lines(repo):
    result = run(repo, "bash", "-ec", job_commands()["No step may wait for the device"])
    assert result.returncode == 1
    assert outcomes(result) == {"passed": 3, "failed": 1}
    builder = (repo / "lengths" / "builder.py").read_text().splitlines()
    for source in ("starts.append(starts[-1] + seq_lens[i].item())", "max_seq_len=int(seq_lens.max()),"):
        line = next(i for i, text in enumerate(builder, 1) if source in text)
        assert f"lengths/builder.py:{line} in build_from_device" in result.stdout
    assert "syncs = 5 > 0" in result.stdout
    reports = [json.loads(file.read_text()) for file in (repo / "sync-reports").iterdir()]
    assert len(reports) == 4
    assert {report["format"] for report in reports} == {"syncfree.report/1"}


def test_the_job_passes_once_the_regression_is_gone(repo):
    (repo / "tests" / "test_regression.py").unlink()
    result = run(repo, "bash", "-ec", job_commands()["No step may wait for the device"])
    assert result.returncode == 0
    assert outcomes(result) == {"passed": 3}


def test_without_its_allow_list_the_known_wait_fails(repo):
    budget = repo / "sync_budget.toml"
    budget.write_text(budget.read_text().split("[[allow]]")[0])
    result = run(repo, sys.executable, "-m", "pytest", "tests/test_builder.py")
    assert outcomes(result) == {"passed": 2, "failed": 1}
    assert "builder.py" in result.stdout
    assert "in _debug_dump (1x)" in result.stdout


def test_an_allow_list_past_its_day_fails_by_name(repo):
    budget = repo / "sync_budget.toml"
    budget.write_text(budget.read_text().replace("2099-01-01", "2020-01-01"))
    result = run(repo, sys.executable, "-m", "pytest", "tests/test_builder.py")
    assert result.returncode == 1
    assert "builder.py:_debug_dump was allowed until 2020-01-01" in result.stdout


def test_its_budget_is_one():
    budget = load_budget(EXAMPLE / "sync_budget.toml")
    assert [item.batch_class for item in budget.classes] == ["decode", "*"]


def test_the_job_installs_what_it_runs():
    install = job_commands()["Install"]
    for package in ("torch", "pytest", "pytest-xdist", "syncfree"):
        assert re.search(rf"\b{package}\b", install)
