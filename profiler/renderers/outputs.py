"""The files that a command was asked to write a report to."""

from __future__ import annotations

from pathlib import Path

from ..files import check_writable, write_whole
from ..report import Report


class Outputs:
    """Each in its form, or None. Raises `BadInput` at once where one cannot be written, before a recording is made."""

    def __init__(
        self,
        *,
        json: Path | None = None,
        html: Path | None = None,
        perfetto: Path | None = None,
        markdown: Path | None = None,
    ) -> None:
        self.json, self.html, self.perfetto, self.markdown = json, html, perfetto, markdown
        if html is not None:
            from .page import require_plotly

            require_plotly()
        for path in (json, html, perfetto, markdown):
            if path is not None:
                check_writable(path)

    def write(self, report: Report) -> None:
        """Each file whole or not at all."""
        if self.markdown is not None:
            from .markdown import render_markdown

            write_whole(self.markdown, render_markdown(report).encode())
        if self.json is not None:
            write_whole(self.json, report.to_json() + b"\n")
        if self.html is not None:
            from .html import render_html

            write_whole(self.html, render_html(report).encode())
        if self.perfetto is not None:
            from .perfetto import render_perfetto

            write_whole(self.perfetto, render_perfetto(report))
