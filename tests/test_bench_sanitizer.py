"""bench/gpu/sanitizer.py: what it makes of compute-sanitizer's answers; one that did not look is never clean."""

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[1] / "bench" / "gpu" / "sanitizer.py"
CLEAN = "echo '========= ERROR SUMMARY: 0 errors'; echo '========= RACECHECK SUMMARY: 0 hazards displayed'"


@pytest.fixture
def sanitizer(monkeypatch):
    spec = importlib.util.spec_from_file_location("sanitizer", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "USUAL_PLACE", "/nowhere")
    return module


@pytest.fixture
def answering(tmp_path, monkeypatch):
    """Put a `compute-sanitizer` with this shell body first on the path."""

    def put(body):
        tool = tmp_path / "compute-sanitizer"
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return put


@pytest.mark.parametrize(
    ("body", "code", "verdict"),
    [
        (CLEAN, 0, "clean"),
        ("echo '========= ERROR SUMMARY: 3 errors'; exit 86", 1, "errors"),
        ("echo '========= Error: Device not supported'; echo '========= ERROR SUMMARY: 0 errors'", 4, "could not look"),
        ("echo nothing", 4, "could not look"),
        (f"{CLEAN}; exit 1", 4, "could not look"),
    ],
)
def test_a_verdict(sanitizer, answering, tmp_path, body, code, verdict):
    answering(body)
    out = tmp_path / "out.json"
    assert sanitizer.run(Path("script.py"), out, 60, "cuda") == code
    told = json.loads(out.read_text())
    assert told["verdict"] == verdict
    assert set(told["tools"]) == {"memcheck", "racecheck"}


@pytest.mark.parametrize(("device", "why"), [("cpu", "no GPU here"), ("cuda", "no compute-sanitizer on this machine")])
def test_where_it_is_not_it_says_so(sanitizer, tmp_path, monkeypatch, device, why):
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "out.json"
    assert sanitizer.run(Path("script.py"), out, 60, device) == 4
    assert json.loads(out.read_text())["verdict"] == f"not run: {why}"
