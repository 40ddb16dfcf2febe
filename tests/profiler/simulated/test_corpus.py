"""What was measured on a GPU, snippet by snippet, is what the simulated device counts."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from corpora import DATA, load, marked_lines, mismatch, run

CASES, TRUTH = load("sync_corpus", "truth.json")
MORE, MEASURED = load("sync_more", "measured.json")

# Snippets that the simulated device cannot run, each with its reason.
NOT_EXPRESSIBLE = {"cupy_get": "CuPy is a library of its own: it needs a real CUDA context"}
MORE_NOT_EXPRESSIBLE = {"to_sparse": "sparse tensors are refused"}
MORE_DIFFERENT = {
    "pageable_nonblocking_then_device_sync": "both lines stop the host, and both are counted; the measured row counts "
    "calls of Synchronize only",
}
FIGURES = (
    "kernel_launch_calls",
    "graph_launch_calls",
    "d2h_copies",
    "h2d_copies",
    "d2d_copies",
    "d2h_pageable",
    "h2d_pageable",
    "memsets",
)


def test_nearly_every_case_can_be_expressed():
    assert len(CASES) - len(NOT_EXPRESSIBLE) >= 80
    assert set(NOT_EXPRESSIBLE) <= set(CASES)


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_EXPRESSIBLE])
def test_syncs_and_their_lines_are_as_measured(name, monkeypatch):
    monkeypatch.syspath_prepend(str(DATA / "sync_corpus"))
    case, row = CASES[name], TRUTH[name]
    counts, lines, notes = run(case)
    assert mismatch(counts, row) is None
    if row["compare"] == "blind":
        assert lines == []
        assert [note.line for note in notes if note.kind == "blind"] == row["sync_lines"]
    else:
        assert lines == row["sync_lines"]
        assert not row["blocked"] or lines == marked_lines(case)
    got = {figure: counts[figure] for figure in FIGURES}
    if row["compare"] != "at_least_one":
        assert got == {figure: row[figure] for figure in FIGURES}


def _params(cases):
    return [name for name in cases if name not in MORE_NOT_EXPRESSIBLE]


@pytest.mark.parametrize("name", _params(MORE))
def test_neighbouring_snippets_are_as_measured(name):
    case, row = MORE[name], MEASURED[name]
    if "raises" in row:
        with pytest.raises((RuntimeError, TypeError, ValueError, NotImplementedError)) as caught:
            run(case)
        assert type(caught.value).__name__ == row["raises"]
        return
    counts, lines, _ = run(case)
    if name in MORE_DIFFERENT:
        assert mismatch(counts, row)
        return
    assert mismatch(counts, row) is None
    assert not marked_lines(case) or lines == marked_lines(case)
