"""A progress bar on stderr while a recording runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .console import console

Advance = Callable[[int, float], None]


@contextmanager
def recording_bar(text: str, steps: int | None = None, seconds: float | None = None) -> Iterator[Advance]:
    """Yields `advance(steps_done, seconds_done)`. The bar fills by steps, else by seconds, else only turns."""
    err = console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"))
    with Progress(*columns, TimeElapsedColumn(), console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(text, total=steps or seconds, done="")

        def advance(steps_done: int, seconds_done: float = 0.0) -> None:
            completed = float(steps_done) if steps is not None or seconds is None else seconds_done
            bar.update(task, completed=completed, done=f"{steps_done} steps")

        yield advance
