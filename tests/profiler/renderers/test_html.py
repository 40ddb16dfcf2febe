"""The page: complete, self-contained, safe against what is in names, and drawn by a real browser."""

import html.parser
import json
import re
import shutil
import subprocess

import pytest
from syncfree.profiler.renderers.figures import figures_of
from syncfree.profiler.renderers.html import render_html
from syncfree.profiler.report import Report, Step, Syncs

pytest.importorskip("plotly")
EVIL = "</script><script>alert(1)</script> | `x` <b>&amp;"


class Page(html.parser.HTMLParser):
    """Elements with their attributes, and the text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.scripts, self._in = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._in = tag

    def handle_endtag(self, tag):
        self._in = None

    def handle_data(self, data):
        if self._in == "script":
            self.scripts.append(data)
        elif self._in != "style" and data.strip():
            self.texts.append(data.strip())

    @property
    def text(self):
        return " ".join(self.texts)


def test_the_charts_of_a_full_report(full):
    page = Page(render_html(full))
    places = [a["id"] for tag, a in page.elements if a.get("id", "").startswith("chart-")]
    assert places == ["chart-durations", "chart-syncs", "chart-sites", "chart-lead", "chart-utilisation", "chart-power"]
    figures = json.loads(page.scripts[0])
    assert [f"chart-{f['id']}" for f in figures] == places
    for words in ("✓ sync-free", "✗ syncs", "? unknown", "several a step", "pass it on", "not seen by probe", "15 ×"):
        assert words in page.text


def test_nothing_is_loaded_from_anywhere(full):
    page = Page(render_html(full))
    for tag, attributes in page.elements:
        assert tag not in ("iframe", "object", "embed", "base")
        assert "src" not in attributes, tag
        assert attributes.get("href", "data:").startswith("data:"), tag
    (policy,) = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy


def test_names_cannot_break_out(full):
    text = render_html(full)
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert "alert(1)</script>" not in own
    page = Page(text)
    assert EVIL in page.text  # shown as it is
    assert sum(tag == "script" for tag, _ in page.elements) == 3
    labels = json.dumps(json.loads(page.scripts[0]))
    assert "<script>" not in labels  # plotly reads tags in labels


def test_classes_and_ranks_differ_by_more_than_colour(full):
    figures = {figure.id: figure for figure in figures_of(full)}
    assert len({trace["marker"]["symbol"] for trace in figures["syncs"].data}) == 5
    assert len({trace["name"] for trace in figures["durations"].data}) == 5
    styles = [(trace["line"]["dash"], trace["marker"]["symbol"]) for trace in figures["lead"].data]
    assert len(set(styles)) == 4  # two ranks, median and least
    bars = figures["sites"].data
    assert "pattern" not in bars[0]["marker"]
    assert bars[1]["marker"]["pattern"]["shape"]


def test_a_report_of_nothing_says_so():
    page = Page(render_html(Report()))
    assert "No steps were found" in page.text
    assert "unknown" in page.text
    assert json.loads(page.scripts[0]) == []


def test_a_hundred_thousand_steps_stay_a_page_and_those_that_wait_stay_on_it():
    steps = [
        Step(index=i, batch_class="decode", duration_us=1000.0 + i % 7, syncs=Syncs(total=0)) for i in range(100_000)
    ]
    for i in (5, 50_000, 99_999):
        steps[i].syncs = Syncs(total=1)
    figures = {figure.id: figure for figure in figures_of(Report(steps=steps))}
    (trace,) = figures["syncs"].data
    assert len(trace["x"]) <= 1000
    assert [x for x, y in zip(trace["x"], trace["y"], strict=True) if y] == [5, 50_000, 99_999]


def test_recordings_of_one_rank_at_different_times_share_an_axis(full):
    for point in full.run_ahead.series[10:20]:
        point.time_us += 3e12
    figures = {figure.id: figure for figure in figures_of(full)}
    times = [x for trace in figures["lead"].data for x in trace["x"] if x is not None]
    assert max(times) - min(times) < 1000


# ------------------------------------------------------------------ in a browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --enable-logging=stderr --v=0"
).split()


def browse(tmp_path, path, width=1280):
    """The page's elements after its scripts ran, what the console said, and every address it asked for."""
    if BROWSER is None:
        pytest.skip("NO BROWSER: chromium is not installed, so the page is NOT seen drawn here")
    log = tmp_path / "net.json"
    run = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}",
         f"--window-size={width},2000",
         "--virtual-time-budget=10000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120, errors="replace",
    )  # fmt: skip
    console = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    asked = re.findall(r'"url":"([^"]*)"', log.read_text(errors="replace")) if log.is_file() else []
    return run.stdout, console, [url for url in asked if "google" not in url]  # the browser's own housekeeping


@pytest.mark.parametrize("which", ["full", "traced"])
def test_a_browser_draws_it_without_a_word_and_without_the_network(tmp_path, request, which):
    report = request.getfixturevalue(which)
    path = tmp_path / "page.html"
    path.write_text(render_html(report))
    dom, console, asked = browse(tmp_path, path)
    assert console == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert dom.count('class="main-svg"') >= len(figures_of(report)) > 0


def test_the_browser_would_tell_of_an_error_and_of_a_request(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('told')</script>")
    _, console, asked = browse(tmp_path, path)
    assert any("told" in line for line in console)
    assert any(url.startswith("http://127.0.0.1:9/") for url in asked)


def test_it_fits_a_telephone(tmp_path, full):
    """Nothing is wider than 400 pixels; seen in a frame of that width, as a browser's window has a least one."""
    (tmp_path / "page.html").write_text(render_html(full))
    frame = tmp_path / "frame.html"
    frame.write_text(
        "<iframe src='page.html' style='border:0;width:400px;height:4000px'></iframe><p id='told'></p><script>"
        "addEventListener('load', () => setTimeout(() => {"
        "const page = document.querySelector('iframe').contentDocument;"
        "const wide = [...page.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > 401);"
        "document.getElementById('told').textContent = page.documentElement.scrollWidth + ' '"
        "+ wide.map(e => e.tagName + '.' + e.className.baseVal).slice(0, 9).join(); }, 3000))</script>"
    )
    if BROWSER is None:
        pytest.skip("NO BROWSER: chromium is not installed, so the page is NOT seen drawn here")
    FLAGS.append("--allow-file-access-from-files")
    try:
        dom, _, _ = browse(tmp_path, frame)
    finally:
        FLAGS.remove("--allow-file-access-from-files")
    (told,) = re.findall(r'id="told">([^<]*)', dom)
    width, _, wide = told.partition(" ")
    assert wide == ""
    assert 300 < int(width) <= 400


def test_a_difference_as_a_page(tmp_path, full):
    import msgspec
    from syncfree.profiler.diff import compare
    from syncfree.profiler.renderers.diff_html import render_difference_html

    for step in full.steps:
        step.syncs.total = 0
    after = msgspec.json.decode(full.to_json(), type=Report)
    for step in after.steps:
        step.duration_us *= 2
        step.syncs.total = 3
    text = render_difference_html(compare(full, after), full, after)
    page = Page(text)
    assert "▲ worse" in page.text
    assert "0 better" in page.text
    (figure,) = json.loads(page.scripts[0])
    assert [trace["name"] for trace in figure["data"][:2]] == ["decode, before (8)", "decode, after (8)"]
    path = tmp_path / "diff.html"
    path.write_text(text)
    dom, console, asked = browse(tmp_path, path)
    assert (console, [url for url in asked if not url.startswith(("file:", "data:"))]) == ([], [])
    assert 'class="main-svg"' in dom
