"""Reports as Prometheus metrics."""

import socket
import sys
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from syncfree.planner.errors import BadInput, Unreachable
from syncfree.profiler.prometheus import MAX_SITES, Exporter
from syncfree.profiler.report import Copies, Launches, PhaseFigures, Report, Site, Source, Step, Syncs


@pytest.fixture
def exporter():
    with Exporter(0) as made:
        yield made


def scrape(exporter):
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return text, {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples, metric, /, **labels):
    return samples.get((metric, tuple(sorted(labels.items()))))


def syncs(d2h=0, stream=0):
    return Syncs(total=d2h + stream, d2h=d2h, h2d=0, stream=stream, device=0, event=0, memset=0, maybe=0)


def step(index, d2h=0, **about):
    figures = {
        "syncs": syncs(d2h),
        "copies": Copies(d2h=d2h, h2d=1, d2d=0, d2h_bytes=8 * d2h, h2d_bytes=64),
        "launches": Launches(kernels=7, graphs=1, captured=0),
    }
    return Step(
        index=index,
        rank=2,
        batch_class="decode",
        duration_us=4000.0,
        blocked_us=50.0 * d2h,
        phases={"build": PhaseFigures(**figures)},
        **figures,
        **about,
    )


def test_a_report_is_counted_and_the_next_one_added(exporter):
    report = Report(
        steps=[step(0), step(1, d2h=3)],
        sites=[Site(file="/app/a.py", line=7, function="f", kind="d2h", count=3)],
    )
    exporter.observe(report)
    exporter.observe(report)
    _, samples = scrape(exporter)
    who = {"rank": "2", "batch_class": "decode"}
    assert value(samples, "syncfree_steps_total", **who) == 4
    assert value(samples, "syncfree_steps_with_sync_total", **who) == 2
    assert value(samples, "syncfree_syncs_total", **who, kind="d2h", phase="build") == 6
    assert value(samples, "syncfree_syncs_total", **who, kind="stream", phase="build") == 0
    assert value(samples, "syncfree_blocked_seconds_total", **who) == pytest.approx(300e-6)
    assert value(samples, "syncfree_launches_total", **who, kind="kernel") == 28
    assert value(samples, "syncfree_launches_total", **who, kind="graph") == 4
    assert value(samples, "syncfree_copied_bytes_total", **who, direction="h2d") == 256
    assert value(samples, "syncfree_step_duration_seconds_count", **who) == 4
    assert value(samples, "syncfree_step_duration_seconds_sum", **who) == pytest.approx(0.016)
    assert value(samples, "syncfree_site_syncs_total", site="/app/a.py:7", function="f", kind="d2h") == 6


def test_every_metric_has_help_a_type_and_a_conventional_name(exporter):
    exporter.observe(Report(steps=[step(0, d2h=1)]))
    text, _ = scrape(exporter)
    families = list(text_string_to_metric_families(text))
    assert len(families) > 8
    for family in families:
        assert family.name.startswith("syncfree_")
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge", "histogram")
        assert not family.name.endswith(("_us", "_ms", "_percent"))


def test_what_is_unknown_is_absent_never_zero(exporter):
    exporter.observe(Report(steps=[Step(index=0, batch_class="decode")]))
    text, samples = scrape(exporter)
    assert value(samples, "syncfree_steps_total", rank="0", batch_class="decode") == 1
    for name in ("syncs_total", "steps_with_sync_total", "launches_total", "copies_total", "blocked_seconds_total"):
        assert f"syncfree_{name}{{" not in text


def test_warm_up_is_left_out(exporter):
    exporter.observe(Report(steps=[step(0, d2h=9, warmup=True, warmup_cause="capture")]))
    assert "syncfree_steps_total{" not in scrape(exporter)[0]


def test_devices_are_gauges_of_their_last_sample(exporter):
    device = {"index": 0, "name": "AMD Instinct MI300X OAM", "arch": "gfx942", "temperature_celsius": None}
    device |= {"utilisation_percent": {"mean": 1, "max": 99, "last": 87}, "power_watts": {"last": 512.0}}
    exporter.observe(Report(telemetry={"devices": [device]}))
    text, samples = scrape(exporter)
    labels = {"device": "0", "name": "AMD Instinct MI300X OAM", "arch": "gfx942"}
    assert value(samples, "syncfree_device_utilization_ratio", **labels) == pytest.approx(0.87)
    assert value(samples, "syncfree_device_power_watts", **labels) == 512.0
    assert "syncfree_device_temperature_celsius{" not in text


def test_devices_of_a_sampler_stand_in_where_reports_carry_none(exporter):
    class Sampler:
        def result(self):
            return {"devices": [{"index": 1, "name": "card", "arch": None, "power_watts": {"last": 90.0}}]}

    exporter.sampler = Sampler()
    exporter.observe(Report())
    _, samples = scrape(exporter)
    assert value(samples, "syncfree_device_power_watts", device="1", name="card", arch="") == 90.0


def test_source_lines_are_bounded(exporter):
    lines = [Site(file="a.py", line=i, function="f", kind="d2h", count=1) for i in range(MAX_SITES + 5)]
    exporter.observe(Report(sites=lines))
    exporter.observe(Report(sites=lines))
    text, samples = scrape(exporter)
    assert text.count("syncfree_site_syncs_total{") == MAX_SITES + 1
    assert value(samples, "syncfree_site_syncs_total", site="other", function="", kind="d2h") == 10
    assert value(samples, "syncfree_site_syncs_total", site="a.py:0", function="f", kind="d2h") == 2


def test_odd_names_are_escaped(exporter):
    exporter.observe(Report(sites=[Site(file='/a "b"\\c\n.py', line=1, function="<lambda>", kind="d2h", count=1)]))
    _, samples = scrape(exporter)
    assert value(samples, "syncfree_site_syncs_total", site='/a "b"\\c\n.py:1', function="<lambda>", kind="d2h") == 1


def test_a_partial_report_is_marked(exporter):
    exporter.observe(Report(source=Source(partial=True)))
    assert scrape(exporter)[1]["syncfree_report_partial", ()] == 1


def test_only_the_loopback_interface_is_served(exporter):
    assert exporter._server.server_address[0] == "127.0.0.1"


def test_a_taken_port_is_one_clear_line_and_a_closed_exporter_frees_it(exporter):
    with pytest.raises(BadInput, match=rf"--prometheus {exporter.port}: cannot be served on 127\.0\.0\.1: Address"):
        Exporter(exporter.port)
    with pytest.raises(BadInput, match="--prometheus 70000"):
        Exporter(70000)
    with Exporter(0) as other:
        port = other.port
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_without_prometheus_client_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(Unreachable, match=r"pip install 'syncfree\[prometheus\]'"):
        Exporter(0)


def test_mismatches_of_a_planner_in_shadow_add_up(exporter):
    from syncfree.profiler.report import PlannerFigures

    exporter.observe(Report(planner=PlannerFigures(mode="shadow", mismatches=2, unread=5, first_mismatch="a: b")))
    exporter.observe(Report(planner=PlannerFigures(mode="shadow", mismatches=1, unread=0)))
    _, samples = scrape(exporter)
    assert value(samples, "syncfree_planner_mismatches_total", mode="shadow") == 3
    assert value(samples, "syncfree_planner_unread_fields_total", mode="shadow") == 5


def test_without_a_planner_there_are_no_series_of_one(exporter):
    exporter.observe(Report(steps=[step(0)]))
    assert "planner_mismatches_total{" not in scrape(exporter)[0]
