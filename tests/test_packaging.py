"""What a user gets from a wheel: one package, a working command, no torch."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command, **more):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=280, check=False, **more)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built in a copy of the files that git knows: a build must neither need nor leave anything else in a checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in listed:
        file = ROOT / name
        if file.is_file() and not name.startswith(("tests/", "bench/")):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, source)
    [built] = out.glob("*.whl")
    return built


def test_the_wheel_holds_only_syncfree(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {n.split("/")[0].split("-")[0] for n in names} == {"syncfree"}
    assert "syncfree/py.typed" in names
    assert not [n for n in names if n.startswith(("syncfree/tests", "syncfree/bench", "syncfree/docs"))]


def test_every_package_in_the_checkout_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        shipped = set(archive.namelist())
    for part in ("planner", "profiler", "backends"):
        for file in (ROOT / part).rglob("*.py"):
            assert f"syncfree/{file.relative_to(ROOT)}" in shipped, (
                f"{file.relative_to(ROOT)}: its package is not listed"
            )


def test_a_fresh_environment_runs_the_command_without_torch(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    before = set(Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()).iterdir())
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    gained = {p.name for p in set(site.iterdir()) - before}
    assert {n for n in gained if not n.endswith(".dist-info")} == {"syncfree"}
    run(python, "-m", "pip", "install", "--quiet", wheel)
    assert "profile" in run(tmp_path / "env" / "bin" / "syncfree", "--help", cwd=tmp_path)
    absent = run(python, "-c", "import importlib.util as u; print(u.find_spec('torch'))", cwd=tmp_path)
    assert absent.strip() == "None"


@pytest.mark.parametrize("arguments", [["--help"], ["profile", "--help"], ["--version"]])
def test_the_command_line_never_imports_torch_to_start(arguments):
    code = (
        "import sys\nfrom syncfree.cli import main\ntry:\n    main(%r)\nfinally:\n    assert 'torch' not in sys.modules"
    )
    run(sys.executable, "-c", code % arguments)


def test_the_planner_is_light():
    code = "import syncfree.planner, sys; print([m for m in ('torch', 'rich', 'zmq', 'typer') if m in sys.modules])"
    assert run(sys.executable, "-c", code).strip() == "[]"
