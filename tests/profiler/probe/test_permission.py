"""Why the probe cannot attach is known before it tries."""

import sys

import pytest
from syncfree.planner.errors import Unreachable
from syncfree.profiler.collectors import probe as collector
from syncfree.profiler.probe import permission
from syncfree.profiler.probe.helper import _reason


@pytest.fixture
def files(monkeypatch, tmp_path):
    """Stands in for /proc: `files(scope=..., status=...)`."""
    real = permission.Path

    def lay(scope=None, status="CapEff:\t0000000000000000\nTracerPid:\t0\n"):
        (tmp_path / "status").write_text(status)
        if scope is not None:
            (tmp_path / "scope").write_text(scope)
        places = {"/proc/self/status": tmp_path / "status", "/proc/sys/kernel/yama/ptrace_scope": tmp_path / "scope"}
        monkeypatch.setattr(permission, "Path", lambda p: places.get(str(p), real(p)))

    return lay


@pytest.mark.parametrize(
    ("scope", "status", "reason"),
    [
        (None, "CapEff:\t0\nTracerPid:\t0\n", None),
        ("1", "CapEff:\t0\nTracerPid:\t0\n", None),  # the parent names its helper as tracer
        ("2", "CapEff:\t0\nTracerPid:\t0\n", "ptrace_scope is 2: only CAP_SYS_PTRACE"),
        ("2", "CapEff:\t0000000000080000\nTracerPid:\t0\n", None),
        ("3", "CapEff:\t0000000000080000\nTracerPid:\t0\n", "ptrace_scope is 3"),
        ("0", "CapEff:\t0\nTracerPid:\t77\n", "being traced by process 77"),
    ],
)
def test_what_the_kernel_says(files, scope, status, reason):
    files(scope, status)
    told = permission._kernel_refusal()
    assert (told is None) if reason is None else reason in told


def test_frida_is_asked_for_by_name(monkeypatch):
    monkeypatch.setattr(permission, "find_spec", lambda name: None)
    assert permission.why_not() == "frida is not installed: pip install 'syncfree[probe]'"


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "x86-64 Linux only" in permission.why_not()


def test_a_process_without_a_runtime_has_nothing_to_hook(monkeypatch, needs_probe):
    monkeypatch.setattr(collector, "loaded", lambda prefixes: [])
    monkeypatch.setattr(collector, "_torch_vendor", lambda: None)
    reason = collector.ProbeCollector.available()
    assert reason == "none of libcuda.so, libamdhip64.so is loaded in this process"
    with pytest.raises(Unreachable, match="probe: none of libcuda"):
        collector.ProbeCollector().start()


def test_the_refusal_names_what_to_change(tmp_path, monkeypatch):
    import syncfree.profiler.probe.helper as helper

    scope = tmp_path / "scope"
    scope.write_text("1\n")
    real = helper.Path
    monkeypatch.setattr(helper, "Path", lambda p: scope if "yama" in str(p) else real(p))
    assert _reason(1, "no").endswith(
        "kernel.yama.ptrace_scope is 1: run as root, or let the target call prctl(PR_SET_PTRACER)"
    )
    assert _reason(4194303, "no") == "process 4194303 does not exist"
