"""What the kernel would say, told before anything is tried: one line, with the reason."""

import os

import pytest
from syncfree.profiler.attach import rights

pytestmark = pytest.mark.attach


@pytest.fixture
def world(monkeypatch, tmp_path):
    """Says what the kernel shows of us and of process 77."""

    def show(*, scope="0", capable=False, uid="1000", tracer="0", readable=True):
        us = {"CapEff": f"{(1 << 19) if capable else 0:x}"}
        them = {"Uid": f"{uid} {uid} {uid} {uid}", "Gid": "1000 1000 1000 1000", "TracerPid": tracer}
        maps = tmp_path / "maps"
        maps.write_text("")
        maps.chmod(0o600)

        class Paths(type(tmp_path)):
            def read_text(self, *arguments, **keywords):
                assert str(self).endswith("ptrace_scope")
                if scope is None:
                    raise FileNotFoundError(2, "no Yama here")
                return scope

            def read_bytes(self):
                if not readable:
                    raise PermissionError(13, "no")
                return b""

        monkeypatch.setattr(rights, "Path", Paths)
        monkeypatch.setattr(rights, "_status", lambda pid: us if pid == os.getpid() else them)
        monkeypatch.setattr(rights, "sandboxed", lambda: None)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        monkeypatch.setattr(os, "getegid", lambda: 1000)

    return show


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ({}, None),
        ({"scope": None}, None),
        ({"scope": "1"}, "only a parent may attach to its child: run as root"),
        ({"scope": "1", "capable": True}, None),
        ({"scope": "2"}, "only CAP_SYS_PTRACE may attach"),
        ({"scope": "2", "capable": True, "uid": "0"}, None),
        ({"scope": "3", "capable": True}, "until the next boot"),
        ({"uid": "0"}, "process 77 belongs to uid 0, you are uid 1000"),
        ({"uid": "0", "capable": True}, None),
        ({"readable": False}, "process 77 is not dumpable"),
        ({"tracer": "5"}, "process 77 is being traced by process 5"),
    ],
)
def test_the_reason(world, shown, reason):
    world(**shown)
    told = rights.why_not(77)
    assert (told is None) if reason is None else (reason in told)
    assert told is None or "\n" not in told


def test_a_sandbox_that_filters_ptrace(world, monkeypatch):
    world()
    monkeypatch.setattr(rights, "sandboxed", lambda: "ptrace is blocked")
    assert rights.why_not(77) == "ptrace is blocked"


def test_without_frida(monkeypatch):
    monkeypatch.setattr(rights, "find_spec", lambda name: None)
    assert "pip install 'syncfree[probe]'" in rights.why_not(os.getpid())


def test_this_machine_lets_root_and_us_in():
    assert rights.why_not(os.getpid()) is None or os.geteuid() != 0
