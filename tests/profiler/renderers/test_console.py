"""The report at a terminal, at the widths that terminals have."""

import pytest
from syncfree.profiler.renderers.console import ClassTable, console, render_report
from syncfree.profiler.report import ClassFigures, Distribution, Note, Report, Site, Source


@pytest.fixture
def report():
    figures = ClassFigures(steps=123456, verdict="sync-free")
    figures.syncs_per_step = Distribution(mean=11.0, p50=11, p99=11.5, max=12)
    figures.launches_per_step = Distribution(mean=640.0, p50=640, p99=640, max=640)
    figures.duration_us = Distribution(mean=5e4, p50=44444, p99=99999, max=1e5)
    figures.build_us = figures.duration_us
    return Report(source=Source(kind="live"), classes={"chunked_prefill": figures})


def lines(report, width):
    made = console(width=width)
    with made.capture() as capture:
        made.print(ClassTable(report))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_every_figure_is_whole_and_on_one_line(report, width):
    shown = lines(report, width)
    (row,) = [line for line in shown if "chunked_prefill" in line]
    assert "…" not in "".join(shown)
    assert max(map(len, shown)) <= width
    figures = row.replace(" ", "")
    for wanted in ("123456", "11/11.5/12", "640", "44.44ms", "100.00ms", "sync-free"):
        assert wanted in figures


def test_names_are_shown_as_they_are(report):
    evil = "a[/b] :smile: [red]c"
    report.classes[evil] = report.classes.pop("chunked_prefill")
    report.notes = [Note(kind=evil, text=evil)]
    report.sites = [Site(file="/m.py", line=1, function=evil, kind="d2h", phase=evil, count=1)]
    made = console(width=200)
    with made.capture() as capture:
        made.print(render_report(report))
    assert capture.get().count(evil) == 5  # class, phase, function, note


def test_copies_are_shown_where_there_is_room(report):
    assert "copies" in "".join(lines(report, 200))
    assert "copies" not in "".join(lines(report, 80))


def test_the_devices_side_of_a_wait_has_columns_or_a_line_of_its_own(report):
    site = Site(file="/m.py", line=1, function="f", kind="d2h", count=2, device_idle_us=503.0, launch_lead_us=12.0)
    report.sites = [site]
    report.run_ahead.device_idle_us = 503.0
    report.run_ahead.launch_lead_us = Distribution(mean=9, p50=8, p99=9, max=9)
    shown = {}
    for width in (80, 200):
        made = console(width=width)
        with made.capture() as capture:
            made.print(render_report(report))
        shown[width] = capture.get()
        assert max(map(len, shown[width].splitlines())) <= width
        assert "launch lead p50 / least: 8 µs / –; device idle because the host waited: 503 µs" in " ".join(
            shown[width].split()
        )
    assert "device idle 503 µs, launch lead 12 µs" in " ".join(shown[80].replace("│", " ").split())
    assert "device idle" in next(line for line in shown[200].splitlines() if "per step" in line)
    site.device_idle_us = site.launch_lead_us = None
    report.run_ahead.device_idle_us, report.run_ahead.launch_lead_us = None, Distribution()
    with made.capture() as capture:
        made.print(render_report(report))
    assert "lead" not in capture.get()
