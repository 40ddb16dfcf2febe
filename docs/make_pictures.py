"""Draws docs/images/demo.svg: what `make demo` prints, for the README. Run it again when the output changes."""

import io
from pathlib import Path

from rich.console import Console
from syncfree.backends.engine.demo import run_demo
from syncfree.profiler.renderers.console import render_report

IMAGES = Path(__file__).parent / "images"


def main() -> None:
    screen = Console(record=True, width=128, file=io.StringIO(), force_terminal=True)
    for builder in ("unplanned", "planned"):
        screen.print(render_report(run_demo(builder), f"embedded engine, {builder} metadata", top=4))
    IMAGES.mkdir(exist_ok=True)
    screen.save_svg(str(IMAGES / "demo.svg"), title="make demo", font_aspect_ratio=0.6)


if __name__ == "__main__":
    main()
