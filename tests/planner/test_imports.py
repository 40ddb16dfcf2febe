"""Modules of the planner build on each other one way, types and functions included."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import syncfree.planner

PLANNER = Path(syncfree.planner.__file__).parent


def imported(tree):
    """Names of modules of this package that a file imports anywhere: at its top, for types, inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            yield from [node.module.partition(".")[0]] if node.module else [alias.name for alias in node.names]


def graph():
    files = {path.stem: path for path in PLANNER.glob("*.py") if path.stem != "__init__"}
    return {
        name: {found for found in imported(ast.parse(path.read_text())) if found in files and found != name}
        for name, path in files.items()
    }


def test_no_module_imports_one_that_imports_it():
    order = list(TopologicalSorter(graph()).static_order())  # raises CycleError, naming the circle
    assert order.index("errors") < order.index("segments") < order.index("batch") < order.index("planner")


def test_a_circle_would_be_seen():
    assert "batch" in graph()["backend"]
    assert list(imported(ast.parse("if X:\n    from .batch import Batch\ndef f():\n    from . import plan"))) == [
        "batch",
        "plan",
    ]
