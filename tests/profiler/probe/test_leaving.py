"""How frida's agent is left: by closing its connection, which it survives in order; and what if it never went."""

import json
import os
import socket
import subprocess
import sys
import threading

import pytest
from syncfree.profiler.probe import helper

pytestmark = pytest.mark.attach

LEAVE = """
import json, os, sys, subprocess
from pathlib import Path
from syncfree.profiler.probe import helper
from syncfree.profiler.probe.attach import _text

def size(pid):
    return [len(list(Path(f"/proc/{pid}/{what}").iterdir())) for what in ("fd", "task")]

target = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)
told = []
try:
    untouched = size(target.pid)
    made = helper.Helper()
    made.attach({"pid": target.pid, "script": _text("agent.js"), "libraries": ["libcuda"]})
    inside = helper._agent_mapped(target.pid)
    connections = len(helper.agent_connections())
    made.session.detach = lambda: told.append("detach")
    answer = made.detach({})
    print(json.dumps({"inside": inside, "connections": connections, "answer": answer, "told": told, "gone": made.gone,
        "left": [len(helper.agent_connections()), helper._agent_mapped(target.pid)],
        "untouched": untouched, "size": size(target.pid), "alive": target.poll() is None}), flush=True)
finally:
    target.kill()
os._exit(0)
"""


def test_the_agent_leaves_because_its_connection_is_closed_not_because_it_is_asked(needs_probe):
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["inside"]
    assert told["connections"] == 1
    assert told["told"] == []
    assert told["answer"] == {"pause_ms": 0.0, "free": True}
    assert not told["gone"]  # the end that we made is not taken for the target's
    assert told["left"] == [0, False]
    assert told["size"] == told["untouched"]
    assert told["alive"]


def inodes(connections):
    found = {os.fstat(c.fileno()).st_ino for c in connections}
    for connection in connections:
        connection.close()
    return found


def test_of_all_sockets_only_those_count_of_which_both_ends_were_made_here(tmp_path):
    before = inodes(helper.agent_connections())
    ours = socket.socketpair()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "listener"))
    listener.listen()
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "listener")], stdin=subprocess.PIPE)
    internet = socket.socket()
    try:
        accepted, _ = listener.accept()
        with accepted, internet:
            assert inodes(helper.agent_connections()) - before == {os.fstat(s.fileno()).st_ino for s in ours}
    finally:
        other.communicate()
        for each in (*ours, listener):
            each.close()


def test_an_agent_that_never_leaves_is_not_waited_for_for_ever(monkeypatch):
    frida = pytest.importorskip("frida")
    entered, never = threading.Event(), threading.Event()

    def shutdown():
        entered.set()
        never.wait()

    monkeypatch.setattr(frida, "shutdown", shutdown)
    helper.Helper()._wait_for_frida(0.05)
    assert entered.wait(60)
    never.set()
