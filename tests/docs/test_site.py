"""The documentation as a site: builds without a warning, no dead link, nothing from another host."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from snippets import PAGES, ROOT

pytest.importorskip("mkdocs", reason="needs mkdocs-material (extra: docs)")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = {"PATH": "", "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore", "HOME": str(out)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"\b(WARNING|ERROR)\b", done.stdout + done.stderr), done.stdout + done.stderr
    return out


class Links(HTMLParser):
    """What a page points at, what it loads, and the anchors it has."""

    def __init__(self):
        super().__init__()
        self.points, self.loads, self.anchors = [], [], set()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if "id" in found:
            self.anchors.add(found["id"])
        if tag == "a" and "href" in found:
            self.points.append(found["href"])
        elif tag in ("script", "img", "link", "iframe", "source") and found.get("rel") not in ("canonical", "next"):
            self.loads += [found[name] for name in ("src", "href") if name in found]


def read(page):
    links = Links()
    links.feed(page.read_text(encoding="utf-8"))
    return links


def test_every_page_is_in_the_navigation(site):
    pages = {page.stem for page in PAGES if page.parent.name == "docs"}
    assert {page.stem for page in site.glob("*.html")} - {"404"} == pages


def test_no_link_is_dead(site):
    pages = {page: read(page) for page in site.rglob("*.html")}
    dead = []
    for page, links in pages.items():
        if page.stem == "404":
            continue
        for link in links.points + links.loads:
            address = urlsplit(link)
            if address.scheme or address.netloc or link.startswith("#__"):
                continue
            target = (page.parent / unquote(address.path)).resolve() if address.path else page
            known = pages[target].anchors if target in pages else set()
            if not target.exists() or (address.fragment and target in pages and address.fragment not in known):
                dead.append(f"{page.name}: {link}")
    assert dead == []


def test_nothing_is_loaded_from_another_host(site):
    for page in site.rglob("*.html"):
        away = [link for link in read(page).loads if urlsplit(link).netloc]
        assert away == [], page.name
        assert "fonts.googleapis" not in page.read_text(encoding="utf-8")


def test_files_and_pages_that_the_text_names_exist():
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:tests|examples|bench|docs|planner|profiler|backends)/[\w./-]*\w)/?`", text):
            if not (ROOT / name).exists():
                missing.append(f"{page.name}: {name}")
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            if not (page.parent / link).exists():
                missing.append(f"{page.name}: {link}")
    assert missing == []
