"""The report page names every field of every object of `syncfree.report/1`."""

import re

import msgspec
import pytest
from snippets import ROOT
from syncfree.profiler import report

TEXT = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
OBJECTS = [
    kind
    for kind in vars(report).values()
    if isinstance(kind, type)
    and issubclass(kind, msgspec.Struct)
    and kind.__module__ == report.__name__
    and not kind.__name__.startswith("_")
]


def section(title):
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("kind", OBJECTS, ids=lambda kind: kind.__name__)
def test_every_field_is_described_and_no_other(kind):
    body = section(kind.__name__)
    assert body, f"no section {kind.__name__}"
    rows = re.findall(r"^\| (`[^|]+`) \|", body, re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", " ".join(rows) if rows else body))
    assert named == set(kind.__struct_fields__)


def test_note_kinds_on_the_page_are_those_in_the_code():
    used = set()
    for file in (ROOT / "profiler").rglob("*.py"):
        used |= set(re.findall(r'Note\(\s*kind="(\w+)"', file.read_text(encoding="utf-8")))
    told = set(re.findall(r"`(\w+)`", re.search(r"^\| `kind` \| (.*)$", section("Note"), re.MULTILINE)[1]))
    assert used <= told, f"undescribed: {sorted(used - told)}"
