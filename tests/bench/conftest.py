"""Programs of bench/ as modules."""

import importlib.util
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def load():
    """`load("gpu/pid_vllm.py")`: a fresh module."""

    def loaded(name):
        spec = importlib.util.spec_from_file_location(f"{Path(name).stem}_program", BENCH / name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return loaded
