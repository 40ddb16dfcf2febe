"""Both packing implementations under every test, the golden vectors, and the brute-force planner."""

import gzip
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from syncfree.planner.schedules import packing

GOLDEN = Path(__file__).parents[2] / "data" / "golden"


@pytest.fixture(params=["python", "native"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs once with the NumPy twin, once with the C extension."""
    if request.param not in packing.IMPLEMENTATIONS:
        pytest.skip("the C extension is not built here (no compiler at install time)")
    monkeypatch.setattr(packing, "active", packing.IMPLEMENTATIONS[request.param])
    return request.param


@pytest.fixture(scope="session")
def golden() -> Any:
    """Records of a golden file, by its name."""

    def records(name: str) -> Iterator[dict[str, Any]]:
        with gzip.open(GOLDEN / f"{name}.jsonl.gz", "rt") as lines:
            yield from (json.loads(line) for line in lines)

    return records


@pytest.fixture(scope="session")
def brute_force() -> ModuleType:
    """`brute_force.py` beside this file: the planners written once more, for clarity alone."""
    spec = importlib.util.spec_from_file_location("schedules_brute_force", Path(__file__).with_name("brute_force.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
