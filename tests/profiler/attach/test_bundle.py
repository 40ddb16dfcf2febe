"""Our modules as one block, for a Python that has nothing of ours."""

import importlib.util
import json
import marshal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from syncfree.errors import Unreachable
from syncfree.profiler.attach import bundle

# What the target's side needs to come up, in a process where no package of ours can be found otherwise.
ALONE = """
import json, marshal, sys, zlib
sys.path[:] = [p for p in sys.path if p]
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__ + getattr(f, "__module__", "")]
modules = marshal.loads(sys.stdin.buffer.read())
names = {"__name__": "syncfree.profiler.attach.bootstrap"}
exec(marshal.loads(zlib.decompress(modules[names["__name__"]][2])), names)
names["settle"](modules, "digest")
import syncfree.profiler.attach.guest, syncfree.backends.vllm
syncfree.backends.vllm.register(attached=True)
print(json.dumps(sorted(n for n in sys.modules if n.startswith("syncfree"))))
names["leave"]()
assert not [f for f in sys.meta_path if hasattr(f, "syncfree_digest")]
"""


def modules_of(block):
    """Module -> file, whether it is a package, code."""
    modules = marshal.loads(block)
    return {name: (*about, marshal.loads(zlib.decompress(code))) for name, (*about, code) in modules.items()}


def test_the_block_is_enough(tmp_path):
    block, _ = bundle.build()
    done = subprocess.run([sys.executable, "-c", ALONE], input=block, capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    loaded = json.loads(done.stdout)
    assert set(loaded) <= set(modules_of(block)) | {"syncfree.planner._rows"}
    assert "syncfree.profiler.agent.server" in loaded
    assert not [name for name in loaded if "renderers" in name or "simulated" in name or "visit" in name]


def test_another_release_is_asked_to_compile_and_the_result_is_the_same_here():
    sources = list(bundle._sources())
    there = modules_of(bundle._elsewhere(sys.executable, sources))
    here = modules_of(bundle.build()[0])
    assert {name: (path, package) for name, (path, package, _) in there.items()} == {
        name: (path, package) for name, (path, package, _) in here.items()
    }
    assert {name: code for name, (*_, code) in there.items()} == {name: code for name, (*_, code) in here.items()}


def test_an_interpreter_that_does_not_run_is_a_reason():
    with pytest.raises(Unreachable, match="does not run here"):
        bundle._elsewhere("/nonexistent/python3", [])
    with pytest.raises(Unreachable, match="cannot compile syncfree"):
        bundle._elsewhere("/bin/false", [])


def test_the_digest_follows_the_sources(monkeypatch, tmp_path):
    first = bundle.build()[1]
    bundle.build.cache_clear()
    more = tmp_path / "more.py"
    more.write_text("")
    changed = [*bundle._sources(), bundle.Source("syncfree.more", str(more), False, "")]
    monkeypatch.setattr(bundle, "_sources", lambda: iter(changed))
    assert bundle.build()[1] != first
    bundle.build.cache_clear()


def test_our_own_release_is_compiled_here():
    assert bundle.build(importlib.util.MAGIC_NUMBER, "/nonexistent")[0]
    assert Path(modules_of(bundle.build()[0])["syncfree.errors"][0]).is_file()
