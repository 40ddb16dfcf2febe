"""What every page shares: one self-contained file with plotly.js inside, safe against what is in names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec

from ...errors import SyncfreeError
from .figures import Figure

# Inline script and style, nothing from anywhere: the browser itself then refuses every request.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
Cell = tuple[str, str]  # markup, class


def page(title: str, body: Iterable[str], figures: Sequence[Figure]) -> str:
    """The whole file, about 5 MB, nearly all of it plotly.js. Raises `SyncfreeError` if plotly is not installed."""
    data = [{"id": f.id, "data": f.data, "layout": f.layout} for f in figures]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_part('page.css')}</style>",
            "</head>\n<body>\n<main>",
            *body,
            "</main>",
            f'<script type="application/json" id="figures">{_embedded(data)}</script>',
            f"<script>{_plotly()}</script>",
            f"<script>\n{_part('page.js')}</script>",
            "</body>\n</html>\n",
        ]
    )


def require_plotly() -> None:
    """Raises `SyncfreeError` if plotly is not installed: asked before work that is to end in a page."""
    if not _plotly_file().is_file():
        raise _missing()


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _plotly_file() -> Traversable:
    """plotly.js as the plotly package ships it; plotly itself, slow to import, is not needed."""
    try:
        return files("plotly").joinpath("package_data", "plotly.min.js")
    except ModuleNotFoundError as error:
        raise _missing() from error


def _plotly() -> str:
    try:
        return _plotly_file().read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise _missing() from error


def _missing() -> SyncfreeError:
    return SyncfreeError("HTML needs plotly: pip install 'syncfree[html]'")


def _embedded(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")


def section(title: str, content: str) -> str:
    """A boxed part of the page; `content` is markup."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


def chart(figure: Figure) -> str:
    """The place that page.js draws a figure in."""
    place = f'<div class="chart" id="chart-{figure.id}" role="img" aria-label="{escape(figure.title)}"></div>'
    return section(figure.title, f'<p class="caption">{escape(figure.caption)}</p>\n{place}')


def table(head: Sequence[Cell], rows: Iterable[Sequence[Cell]]) -> str:
    """A table whose rows become cards on a narrow screen: each cell carries its column's name."""
    columns = "".join(f'<th class="{kind}">{escape(name)}</th>' for name, kind in head)
    lines = []
    for row in rows:
        cells = zip(row, head, strict=True)
        lines.append(
            "".join(f'<td class="{kind}" data-label="{escape(name)}">{text}</td>' for (text, kind), (name, _) in cells)
        )
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>\n<thead><tr>{columns}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def number_cell(text: str) -> Cell:
    """A cell of figures, right-aligned."""
    return escape(text), "number"
