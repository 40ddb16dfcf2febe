"""Every extra in a virtual environment of its own, from a wheel, doing what it is for. Minutes: `make test-extras`."""

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TRACE = ROOT / "tests" / "data" / "traces" / "rocm_mixed.json.gz"
TORCH = re.search(r"^TORCH_CPU = (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def run(*command, code=0, **more):
    command = [str(word) for word in command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False, **more)
    assert done.returncode == code, f"{command}: exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the files that git knows."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines():
        file = ROOT / name
        if file.is_file() and not name.startswith(("tests/", "bench/")):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, source)
    [built] = out.glob("*.whl")
    return built


class Environment:
    """A clean virtual environment with the wheel and one extra; commands run in a folder outside the checkout."""

    def __init__(self, folder, wheel, *wanted):
        self.folder = folder / "work"
        self.folder.mkdir()
        venv.create(folder / "env", with_pip=True)
        self.bin = folder / "env" / "bin"
        self.variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))},
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "SYNCFREE_SOCKET_DIR": str(self.folder / "sockets"),
        }
        self.python("-m", "pip", "install", "--quiet", *(str(word).replace("WHEEL", str(wheel)) for word in wanted))

    def python(self, *arguments, **more):
        return run(self.bin / "python", *arguments, cwd=self.folder, env=self.variables, **more)

    def syncfree(self, *arguments, **more):
        return run(self.bin / "syncfree", *arguments, cwd=self.folder, env=self.variables, **more)

    def has(self, module):
        code = f"import importlib.util as u; print(u.find_spec({module!r}) is not None)"
        return self.python("-c", code).strip() == "True"


def check_core(env):
    """No extra: plan, read a trace, gate, compare, serve."""
    assert not env.has("torch")
    assert "cost: 0 syncs" in env.syncfree("plan", "-b", "aiter_mla", "--query-lens", "1,1", "--seq-lens", "9,70")
    env.syncfree("trace", TRACE, "-o", "r.json", "--markdown", "r.md", "--perfetto", "r.perfetto.json")
    env.syncfree("check", "r.json", "--fail-on", "*:syncs=1000")
    env.syncfree("diff", "r.json", "r.json")
    env.syncfree("doctor")
    service = subprocess.Popen([env.bin / "syncfree", "serve"], stdout=subprocess.PIPE, env=env.variables, text=True)
    try:
        assert service.stdout.readline().startswith("ipc://")
        assert '"plans":0' in env.syncfree("serve", "--health")
        env.syncfree("serve", "--stop")
        assert service.wait(60) == 0
    finally:
        service.kill()
        service.communicate()


def check_torch(env):
    assert "the planned" not in env.syncfree("profile", "--demo", "--steps", "8", "--json", "r.json")
    env.syncfree("check", "r.json", "--fail-on", "*:syncs=0")
    env.syncfree("check", "r.unplanned.json", "--fail-on", "*:syncs=0", code=1)


def check_probe(env):
    env.python("-c", "import frida; from syncfree.profiler.collectors.probe import ProbeCollector")
    assert '"frida"' in env.syncfree("doctor", "--json")


def check_rocm(env):
    assert env.has("amdsmi")
    env.syncfree("doctor")


def check_nvidia(env):
    env.python("-c", "import pynvml")
    env.syncfree("doctor")


def check_html(env):
    env.syncfree("trace", TRACE, "--html", "r.html")
    assert "plotly" in (env.folder / "r.html").read_text().lower()


def check_prometheus(env):
    env.python("-c", "from syncfree.profiler.prometheus import Exporter; assert Exporter(0).port > 0")


def check_docs(env):
    run(env.bin / "python", "-m", "mkdocs", "build", "--strict", "-q", "--site-dir", env.folder / "site", cwd=ROOT)
    assert (env.folder / "site" / "start.html").exists()


def check_dev(env):
    tests = ROOT / "tests" / "planner" / "test_batch.py"
    env.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml", tests)
    env.python("-m", "ruff", "check", "--no-cache", ROOT / "cli.py")


CHECKS = {
    "": check_core,
    "torch": check_torch,
    "probe": check_probe,
    "rocm": check_rocm,
    "nvidia": check_nvidia,
    "html": check_html,
    "prometheus": check_prometheus,
    "docs": check_docs,
    "dev": check_dev,
}


def test_every_extra_has_a_check():
    assert set(CHECKS) == {"", *EXTRAS}


@pytest.mark.parametrize("extra", list(CHECKS), ids=lambda extra: extra or "none")
def test_an_extra_does_what_it_is_for(extra, wheel, tmp_path):
    wanted = [f"WHEEL[{extra}]" if extra else "WHEEL"]
    if extra == "torch":  # the CPU's build is enough; the open range alone would bring a GPU's
        wanted.append(TORCH)
    CHECKS[extra](Environment(tmp_path, wheel, *wanted))
