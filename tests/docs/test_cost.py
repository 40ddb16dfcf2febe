"""The table of what waits, row by row, on the simulated device."""

import re
from pathlib import Path

import pytest
import torch
from syncfree.profiler import Profiler, simulated_device

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cost.md"
SECTION = PAGE.read_text(encoding="utf-8").partition("## What waits")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (`[^|]*?) \| (yes|no)\b", SECTION, re.MULTILINE)
CODE = [(code, waits == "yes") for cell, waits in ROWS for code in re.findall(r"`([^`]+)`", cell)]


def test_the_table_was_found():
    assert len(CODE) >= 10


SPELLED_OUT = {
    "if x:": "if x[0]: pass",
    "nonzero": "x.nonzero()",
    "masks as index": "x[mask]",
    "unique": "x.unique()",
    "torch.tensor(list, device=...)": "torch.tensor([1, 2], device=device)",
}


@pytest.mark.parametrize(("code", "waits"), CODE)
def test_a_row_is_true(code, waits):
    code = {
        "if x:": "if x[0]: pass",
        "nonzero": "x.nonzero()",
        "masks as index": "x[mask]",
        "unique": "x.unique()",
    }.get(code, code)
    code = code.replace("torch.tensor(list, device=...)", "torch.tensor([1, 2], device=device)")
    with simulated_device() as device:
        names = {
            "torch": torch,
            "device": device,
            "x": torch.arange(4, device=device),
            "mask": torch.tensor([True, False, True, False], device=device),
            "pageable": torch.empty(4, dtype=torch.int64),
            "event": torch.cuda.Event(),
            "repeat_interleave": torch.repeat_interleave,
        }
        if code.startswith(("x.item", "int(x)")):
            names["x"] = torch.ones((), device=device)
        names["event"].record()
        with Profiler() as profiler, profiler.step():
            exec(code, names)
    assert (profiler.report.steps[0].syncs.total > 0) == waits
