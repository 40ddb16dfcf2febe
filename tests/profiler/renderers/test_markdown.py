"""The report as Markdown."""

import pytest
from syncfree.profiler.renderers.markdown import duration, escaped, number, render_markdown
from syncfree.profiler.report import Report


def rows(text):
    """The cells of all table rows; a bar that was escaped belongs to its cell."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")] for line in lines]


def test_verdicts_sites_and_totals(traced):
    text = render_markdown(traced, "decode | run")
    assert text.startswith("## decode \\| run\n")
    table = rows(text)
    assert table[2] == ["decode", "3", "0 (max 1)", "2 (max 3)", "6.00 ms / 6.00 ms", "✗ syncs"]
    site = next(row for row in table if row[0].startswith("backends/bad.py:7"))
    assert site == ["backends/bad.py:7 build", "d2h", "other", "1", "1", "258 µs", "503 µs", "0 µs"]
    assert ["kernels that ran", "19"] in table


def test_every_row_of_a_table_has_its_columns_whatever_is_in_names(full):
    text = render_markdown(full)
    width = None
    for line in text.splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = len(line.replace("\\|", "").strip("|").split("|"))
        width = width or cells
        assert cells == width
    assert "<script>" not in text


def test_unknown_is_a_dash_and_never_a_zero():
    text = render_markdown(Report())
    assert "No steps were found" in text
    assert ["syncs", "–"] in rows(text)


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0, "0 µs"), (999.4, "999 µs"), (1500, "1.50 ms"), (2.5e6, "2.50 s")]
)
def test_durations(value, text):
    assert duration(value) == text


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (0, "0"), (12345, "12,345"), (1.25, "1.2"), (2.0, "2")])
def test_numbers(value, text):
    assert number(value) == text


def test_text_stays_on_one_line():
    assert escaped("a\n| b <i>") == "a \\| b \\<i\\>"
