"""The live view: many ranks, narrow and wide, in a terminal, without colour, in a pipe."""

import io
import re

import pytest
from rich.console import Console
from syncfree.profiler.classes import class_figures
from syncfree.profiler.renderers.live import render_live, show_live
from syncfree.profiler.report import (
    Launches,
    Note,
    PhaseFigures,
    Report,
    Site,
    Source,
    Step,
    Syncs,
    Totals,
)

COLOUR = re.compile(r"\x1b\[[0-9;]*(3[0-7]|38|4[0-7]|48|9[0-7])[0-9;]*m")


def view(ranks, slow=5, notes=0):
    steps = [
        Step(
            rank=rank,
            index=i,
            batch_class="decode",
            duration_us=20000.0 + 10 * rank + (9000 if rank == slow else 0),
            syncs=Syncs(total=2),
            launches=Launches(kernels=640, graphs=1, captured=0),
            phases={"build": PhaseFigures(duration_us=1500.0)},
        )
        for rank in range(ranks)
        for i in range(10)
    ]
    site = Site(
        file="/opt/venv/lib/python3.12/site-packages/vllm/v1/worker/gpu_model_runner.py",
        line=2231,
        function="GPUModelRunner._prepare_inputs",
        kind="d2h",
        phase="build",
        count=40,
    )
    return Report(
        source=Source(engine="vllm 0.32.0", ranks=list(range(ranks))),
        steps=steps,
        classes=class_figures(steps),
        sites=[site],
        notes=[Note(kind="straggler", text=f"rank {k} is a straggler") for k in range(notes)],
    )


def drawn(report, width, height=50, terminal=True, **more):
    to = io.StringIO()
    screen = Console(file=to, width=width, height=height, force_terminal=terminal, highlight=False, **more)
    screen.print(render_live(report, len(report.steps), 3.0))
    return to.getvalue()


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()


def ranks_shown(lines):
    """Ranks named in the table of ranks, and the lines it takes."""
    at = next(i for i, line in enumerate(lines) if line.startswith("ranks ("))
    rows = [re.findall(r"(\d+) +10 +2\.0", line) for line in lines[at:]]
    return [int(number) for row in rows for number in row], sum(1 for row in rows if row)


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("ranks", [2, 8, 64, 512])
def test_every_line_fits_and_the_straggler_is_on_the_screen(ranks, width):
    lines = plain(drawn(view(ranks, slow=1), width))
    assert max(map(len, lines)) <= width
    assert len(lines) <= 50
    numbers, _ = ranks_shown(lines)
    assert 1 in numbers
    assert numbers == sorted(numbers) or width == 200


def test_all_ranks_are_shown_where_there_is_room_and_else_the_slowest():
    assert ranks_shown(plain(drawn(view(8), 80)))[0] == list(range(8))
    numbers, rows = ranks_shown(plain(drawn(view(40), 200)))
    assert (sorted(numbers), rows) == (list(range(40)), 14)
    lines = plain(drawn(view(64), 80))
    numbers, _ = ranks_shown(lines)
    assert numbers == [5, *range(49, 64)]
    assert any("and 48 ranks that are faster, step mean 20.00 ms to 20.48 ms" in line for line in lines)


def test_a_low_terminal_gets_fewer_ranks_and_a_pipe_all():
    assert len(ranks_shown(plain(drawn(view(64), 80, height=24)))[0]) == 4
    assert sorted(ranks_shown(plain(drawn(view(64), 80, terminal=False)))[0]) == list(range(64))


def test_ranks_are_compared_with_the_middle_one():
    (line,) = [line for line in plain(drawn(view(4, slow=2), 80)) if re.match(r" +2 +10 ", line)]
    assert line.split()[-2:] == ["+45", "%"]


def test_colour_is_only_where_it_is_wanted():
    assert COLOUR.search(drawn(view(8), 80, color_system="standard"))
    assert not COLOUR.search(drawn(view(8), 80, no_color=True, color_system="standard"))
    assert "\x1b" not in drawn(view(8), 80, terminal=False)


def test_many_notes_are_summed_up():
    lines = plain(drawn(view(8, notes=9), 80))
    assert sum("is a straggler" in line for line in lines) == 5
    assert lines[-1] == "and 4 more notes"


def test_an_interval_without_steps_says_so_and_shows_what_was_counted():
    idle = Report(totals=Totals(syncs=Syncs(total=3), launches=Launches(kernels=12, graphs=0)))
    text = drawn(idle, 80)
    assert "no step ended in this interval" in text
    assert "counted: 3 syncs, 12 launches, 0 graph launches" in text
    assert "counted" not in drawn(Report(), 80)


def test_a_pipe_gets_one_view_after_another(capsys):
    show_live(iter([view(2), view(2)]))
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("vllm")] == [
        "vllm 0.32.0 · device unknown · 20 steps in 0 s",
        "vllm 0.32.0 · device unknown · 40 steps in 0 s",
    ]
    assert "\x1b" not in out
    assert out.endswith("\n\n")
