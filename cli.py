"""The `syncfree` command line. Every command imports what it needs when it runs: none of them loads torch to start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from syncfree import __version__
from syncfree.errors import BadInput, NothingMeasured, SyncfreeError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from syncfree.profiler import Report
    from syncfree.profiler.budget import Budget
    from syncfree.profiler.renderers.outputs import Outputs
    from syncfree.profiler.renderers.progress import Advance

app = typer.Typer(
    name="syncfree",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Plan attention metadata without a device-to-host sync, and prove that a step has none.\n\n"
    "Exit codes: 0 fine, 1 a budget exceeded or a difference found, 2 bad usage or input, "
    "3 target unreachable, refused or dead, 4 nothing measured.",
)


# Newer typer carries its own click, older typer uses the real one: the class is found through what typer exports.
_USAGE: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _version(value: bool) -> None:
    if value:
        print(f"syncfree {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback where an error ends the command.")] = False,
) -> None:
    """Options of every command."""


SECONDS_DEFAULT = 10.0
Sockets = Annotated[
    list[Path] | None,
    typer.Option("--socket", help="A worker's agent socket; repeat for several. Without any target: all found here."),
]
Pids = Annotated[
    list[int] | None,
    typer.Option("--pid", min=1, help="A running server without syncfree in it: its workers are attached to."),
]
Collectors = Annotated[str, typer.Option("--collectors", help="auto, or names: probe, kineto, simulated.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the report (syncfree.report/1) to this file.")]
FailOn = Annotated[
    list[str] | None, typer.Option("--fail-on", help="CLASS:FIGURE=LIMIT, e.g. decode:syncs=0. Exceeded: exit 1.")
]
BudgetFile = Annotated[Path | None, typer.Option("--budget", help="A budget file (TOML). Exceeded: exit 1.")]


Lengths = Annotated[str | None, typer.Option(metavar="N,N,...")]


@app.command(
    epilog="Examples: [bold]syncfree plan --backend aiter_fa --query-lens 1,1,40 --seq-lens 9,70,90[/], "
    "[bold]syncfree plan --backend aiter_mla --input batch.json --json[/]"
)
def plan(
    backend: Annotated[str, typer.Option("--backend", "-b", help="aiter_fa, aiter_mla, triton, triton_mla, or yours.")],
    query_lens: Lengths = None,
    seq_lens: Lengths = None,
    prefill_lens: Lengths = None,
    cached_lens: Lengths = None,
    is_prefilling: Lengths = None,
    seq_lens_lower: Lengths = None,
    decode_threshold: Annotated[int | None, typer.Option(help="Longest query of a decode row (1 + drafts).")] = None,
    num_tokens: Annotated[int | None, typer.Option(help="Launched tokens, graph padding included.")] = None,
    input: Annotated[str | None, typer.Option("--input", "-i", help="The batch as JSON: a file or - (stdin).")] = None,
    set: Annotated[
        list[str] | None, typer.Option("--set", help="environment.NAME=VALUE or limits.NAME=VALUE; repeatable.")
    ] = None,
    reorder: Annotated[bool, typer.Option("--reorder", help="Order the rows as vLLM does; do not refuse.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print syncfree.plan/1 as JSON.")] = False,
) -> None:
    """The minimal metadata plan of a batch: each field with its consumer, what is left out and why, the cost."""
    from syncfree.backends.attention import attention_backend
    from syncfree.planner.show import run_plan

    lists = {
        "query_lens": query_lens,
        "seq_lens": seq_lens,
        "prefill_lens": prefill_lens,
        "cached_lens": cached_lens,
        "is_prefilling": is_prefilling,
        "seq_lens_lower": seq_lens_lower,
    }
    run_plan(
        attention_backend(backend),
        file=input,
        lists=lists,
        settings=set or (),
        reorder=reorder,
        json=json,
        decode_threshold=decode_threshold,
        num_tokens=num_tokens,
    )


@app.command(
    epilog="Examples: [bold]syncfree profile --demo[/], "
    "[bold]syncfree profile --socket /run/user/0/syncfree/4242-0.sock --seconds 10 --json r.json[/], "
    "[bold]syncfree profile --pid 4242[/], [bold]syncfree profile --pid 4242 --steps 50 --verify[/]"
)
def profile(
    demo: Annotated[bool, typer.Option("--demo", help="Profile the embedded engine, with both builders.")] = False,
    socket: Sockets = None,
    pid: Pids = None,
    url: Annotated[
        str | None,
        typer.Option("--url", help="A vLLM server: by our endpoint in it (SYNCFREE_TOKEN), else by its own traces."),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Stop after so many steps.")] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=0.01, help="Stop after so many seconds (default 10).")
    ] = None,
    builder: Annotated[str, typer.Option("--builder", help="Demo only: both, unplanned or planned.")] = "both",
    collectors: Collectors = "auto",
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Count with probe and kineto: exit 1 where they differ, 4 if unable."),
    ] = False,
    json: Json = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a self-contained HTML page.")] = None,
    perfetto: Annotated[Path | None, typer.Option("--perfetto", help="Write tracks for ui.perfetto.dev.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write Markdown for a pull request.")] = None,
    fail_on: FailOn = None,
    budget: BudgetFile = None,
) -> None:
    """Count syncs, copies and launches per step and batch class, of the demo engine or of a live server."""
    _one_target("profile", demo, socket, pid, url)
    if verify and (demo or collectors != "auto"):
        other = "--demo, whose device is simulated" if demo else f"--collectors {collectors}"
        raise BadInput(f"profile: --verify: expected a live target and its own choice of collectors, got {other}")
    wanted = _budget(fail_on, budget)
    outputs = _outputs(json, html, perfetto, markdown)
    if demo:
        report = _profile_demo(builder, steps, json)
    else:
        if steps is None and seconds is None:
            seconds = SECONDS_DEFAULT
        report = _profile_live(socket, pid, url, steps, seconds, collectors, verify)
        _show(report)
    outputs.write(report)
    if verify:
        _verified(report)
    _gate(report, wanted)


def _one_target(command: str, demo: bool, sockets: list[Path] | None, pids: list[int] | None, url: str | None) -> None:
    targets = {"--demo": demo, "--socket": bool(sockets), "--pid": bool(pids), "--url": url is not None}
    if sum(targets.values()) > 1:
        raise BadInput(f"{command}: expected one target, got {' and '.join(name for name in targets if targets[name])}")


def _profile_demo(builder: str, steps: int | None, json: Path | None) -> Report:
    try:
        from syncfree.backends.engine.demo import BUILDERS, run_demo
    except ModuleNotFoundError as error:
        raise BadInput(
            f"profile --demo: expected {error.name} (a CPU build of torch is enough): pip install torch"
        ) from None

    names = list(BUILDERS) if builder == "both" else [builder]
    if any(name not in BUILDERS for name in names):
        raise BadInput(f"profile: --builder: expected both, {' or '.join(BUILDERS)}; got {builder!r}")
    reports = {}
    for name in names:
        with _progress(f"demo engine, {name} metadata", steps) as advance:
            reports[name] = run_demo(name, steps=steps, progress=advance)
        _show(reports[name], title=f"embedded engine, {name} metadata")
    if json is not None and len(names) > 1:
        from syncfree.profiler.files import is_special, write_whole

        other = json if is_special(json) else json.with_name(f"{json.stem}.unplanned{json.suffix}")
        write_whole(other, reports["unplanned"].to_json() + b"\n")
    return reports[names[-1]]


def _profile_live(
    paths: list[Path] | None,
    pids: list[int] | None,
    url: str | None,
    steps: int | None,
    seconds: float | None,
    collectors: str,
    verify: bool,
) -> Report:
    from syncfree.backends.live import profile_live
    from syncfree.profiler.collectors.base import CannotCount
    from syncfree.profiler.devices.telemetry import Sampler
    from syncfree.profiler.verify import VERIFYING

    text = "recording " + (", ".join(str(path) for path in paths) if paths else "every agent found here")
    text = f"recording {url}" if url else f"recording the workers of {', '.join(map(str, pids))}" if pids else text
    try:
        with _progress(text, steps, seconds) as advance, Sampler() as sampler:
            report = profile_live(
                paths=paths or (),
                pids=pids or (),
                url=url,
                steps=steps,
                seconds=seconds,
                collectors=VERIFYING if verify else collectors,
                progress=advance,
            )
    except CannotCount as error:
        if verify:
            raise NothingMeasured(f"probe and kineto could not be compared: {error}") from error
        raise
    report.telemetry = report.telemetry or sampler.result()
    return report


def _verified(report: Report) -> None:
    """Print what two collectors tell of the same steps; exit 1 where they differ, 4 where that cannot be told."""
    from syncfree.profiler.renderers.console import console
    from syncfree.profiler.renderers.verification import render_verification
    from syncfree.profiler.verify import outcome

    for table in render_verification(report):
        console().print(table)
    found = outcome(report)
    if found.exit_code:
        print(f"syncfree: {found.text}", file=sys.stderr)
        raise typer.Exit(found.exit_code)
    console().print(found.text)


@app.command(
    epilog="Examples: [bold]syncfree trace rank0.pt.trace.json.gz --json > r.json[/], "
    "[bold]syncfree trace results_hip_api_trace.csv --step 'decode*'[/]"
)
def trace(
    files: Annotated[list[Path], typer.Argument(help="Kineto, rocprofv3 or Nsight Systems files, or folders of them.")],
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, not as tables.")] = False,
    step: Annotated[
        list[str] | None,
        typer.Option("--step", help="Ranges of this name or glob are steps (none: no steps)."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the report to this file.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a self-contained HTML page.")] = None,
    perfetto: Annotated[Path | None, typer.Option("--perfetto", help="Write tracks for ui.perfetto.dev.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write Markdown for a pull request.")] = None,
    fail_on: FailOn = None,
    budget: BudgetFile = None,
) -> None:
    """The same report from trace files: PyTorch (CUDA and ROCm), rocprofv3, Nsight Systems."""
    from syncfree.profiler.readers import nothing_measured, read_traces

    wanted = _budget(fail_on, budget)
    outputs = _outputs(output, html, perfetto, markdown)
    named = step or "auto"
    report = read_traces(files, steps="none" if named == ["none"] else named)
    if json:
        sys.stdout.buffer.write(report.to_json() + b"\n")
        sys.stdout.buffer.flush()
    else:
        _show(report)
    outputs.write(report)
    reason = nothing_measured(report)
    if reason is not None:
        raise NothingMeasured(reason)
    _judge(report, wanted, silent=json)


def _progress(text: str, steps: int | None = None, seconds: float | None = None) -> AbstractContextManager[Advance]:
    """A progress bar on stderr; yields a callback `advance(steps_done, seconds_done)`."""
    from syncfree.profiler.renderers.progress import recording_bar

    return recording_bar(text, steps, seconds)


def _show(report: Report, title: str | None = None) -> None:
    from syncfree.profiler.renderers.console import console, render_report

    console().print(render_report(report, title))


def _outputs(
    json: Path | None = None, html: Path | None = None, perfetto: Path | None = None, markdown: Path | None = None
) -> Outputs:
    from syncfree.profiler.renderers.outputs import Outputs

    return Outputs(json=json, html=html, perfetto=perfetto, markdown=markdown)


def _budget(fail_on: list[str] | None, file: Path | None) -> Budget | None:
    """Read before anything runs: a typing mistake must not cost a recording."""
    if not fail_on and file is None:
        return None
    from syncfree.profiler.budget import load_budget, parse_fail_on

    short = parse_fail_on(fail_on or ())
    return short if file is None else load_budget(file).merged(short)


def _gate(report: Report, budget: Budget | None) -> None:
    if not report.steps and not report.totals.api:
        raise NothingMeasured("no step was recorded: is the engine stepping? send it requests, or record for longer")
    _judge(report, budget)


def _judge(report: Report, budget: Budget | None, silent: bool = False) -> None:
    """Exit with the gate's code where it is not kept; `silent`: stdout holds JSON, so there is no table."""
    if budget is None:
        return
    from syncfree.profiler.gate import check as judge
    from syncfree.profiler.renderers.console import console
    from syncfree.profiler.renderers.gate import render_gate

    gate = judge(report, budget)
    if not budget.classes and not gate.expired:
        raise BadInput("the budget has an allow-list only: expected a limit such as --fail-on decode:syncs=0")
    if not silent:
        console().print(render_gate(gate))
    if gate.exit_code:
        print(f"syncfree: {gate.summary()}", file=sys.stderr)
        raise typer.Exit(gate.exit_code)


@app.command(epilog="Example: [bold]syncfree check r.json --budget budget.toml[/]")
def check(
    report: Annotated[Path, typer.Argument(help="A report that --json wrote.")],
    budget: BudgetFile = None,
    fail_on: FailOn = None,
) -> None:
    """Judge a report by a budget: exit 0 kept, 1 exceeded, 4 a figure is unknown."""
    from syncfree.profiler import Report

    wanted = _budget(fail_on, budget)
    if wanted is None:
        raise BadInput("check: expected --budget FILE or --fail-on CLASS:FIGURE=LIMIT")
    _gate(Report.load(report), wanted)


@app.command(epilog="Example: [bold]syncfree diff main.json branch.json --markdown >> $GITHUB_STEP_SUMMARY[/]")
def diff(
    before: Annotated[Path, typer.Argument(help="The report to compare with.")],
    after: Annotated[Path, typer.Argument(help="The report that may have changed.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown for a pull request.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a self-contained HTML page.")] = None,
) -> None:
    """Compare two reports per class and source line: exit 1 where something got worse."""
    import msgspec
    from syncfree.profiler import Report
    from syncfree.profiler.diff import compare
    from syncfree.profiler.renderers.console import console
    from syncfree.profiler.renderers.diff import render_diff, render_markdown

    _outputs(html=html)
    old, new = Report.load(before), Report.load(after)
    difference = compare(old, new)
    if html is not None:
        from syncfree.profiler.files import write_whole
        from syncfree.profiler.renderers.diff_html import render_difference_html

        write_whole(html, render_difference_html(difference, old, new).encode())
    if json:
        print(msgspec.json.encode(difference).decode())
    elif markdown:
        print(render_markdown(difference))
    else:
        console().print(render_diff(difference))
    if difference.exit_code:
        print(f"syncfree: {difference.summary()}", file=sys.stderr)
        raise typer.Exit(difference.exit_code)


@app.command(
    epilog="Examples: [bold]syncfree watch[/] (every rank found here), "
    "[bold]syncfree watch --pid 4242[/] (nothing prepared in that server), "
    "[bold]SYNCFREE_TOKEN=secret syncfree watch --url http://localhost:8000[/], "
    "[bold]syncfree watch --socket /run/user/0/syncfree/4242-0.sock --prometheus 9464[/]"
)
def watch(
    socket: Sockets = None,
    pid: Pids = None,
    url: Annotated[
        str | None, typer.Option("--url", help="A vLLM server with our endpoint in it (SYNCFREE_TOKEN).")
    ] = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two views.")] = 2.0,
    seconds: Annotated[float | None, typer.Option("--seconds", min=0.1, help="End after so many seconds.")] = None,
    prometheus: Annotated[
        int | None, typer.Option("--prometheus", min=0, max=65535, help="Also serve metrics on 127.0.0.1:PORT.")
    ] = None,
    collectors: Collectors = "auto",
) -> None:
    """A live view of one or many ranks: syncs, launches and step times per batch class, and the lines that wait."""
    from contextlib import ExitStack, closing

    from syncfree.backends.live import watch_live
    from syncfree.profiler.renderers.live import show_live

    _one_target("watch", False, socket, pid, url)
    with ExitStack() as stack:
        observe = None
        if prometheus is not None:
            from syncfree.profiler.devices.telemetry import Sampler
            from syncfree.profiler.prometheus import Exporter

            exporter = stack.enter_context(Exporter(prometheus))
            exporter.sampler = stack.enter_context(Sampler())
            observe = exporter.observe
            print(f"metrics: http://127.0.0.1:{exporter.port}/metrics", file=sys.stderr)
        reports = watch_live(paths=socket or (), pids=pid or (), url=url, interval=interval, collectors=collectors)
        waiting = f"attaching to the workers of {', '.join(map(str, pid))}" if pid else "waiting for the first steps"
        show_live(stack.enter_context(closing(reports)), seconds, observe, waiting)


@app.command(
    epilog="Examples: [bold]syncfree serve[/], [bold]syncfree serve --idle 600[/], [bold]syncfree serve --health[/], "
    "[bold]syncfree serve --socket /run/user/0/syncfree/plan.sock[/]"
)
def serve(
    socket: Annotated[
        Path | None, typer.Option("--socket", help="Where to listen; by default plan.sock in the socket directory.")
    ] = None,
    idle: Annotated[
        float | None, typer.Option("--idle", min=0.1, help="End after so many seconds without a request.")
    ] = None,
    health: Annotated[bool, typer.Option("--health", help="Ask the service that runs there how it is (JSON).")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the service that runs there.")] = False,
) -> None:
    """Plan for schedulers in other processes and languages, on a Unix socket, until SIGTERM or Ctrl-C."""
    if health or stop:
        import msgspec
        from syncfree.backends.service import PlanClient

        with PlanClient(socket) as client:
            if health:
                print(msgspec.json.encode(client.health()).decode())
            if stop:
                client.stop()
        return
    from syncfree.backends.service import serve as run

    run(socket, idle_s=idle, announce=lambda path: print(f"ipc://{path}", flush=True))


@app.command(epilog="Example: [bold]syncfree doctor[/]")
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """What is installed, what each collector can see on this machine, and how to mend what is missing."""
    from syncfree.profiler.doctor import examine
    from syncfree.profiler.renderers.console import console
    from syncfree.profiler.renderers.doctor import render_checkup

    checkup = examine()
    if json:
        print(checkup.to_json().decode())
    else:
        console().print(render_checkup(checkup))


def _usage(error: Exception) -> int:
    """A usage error as one line; the help itself where the command was called with nothing."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]
        return 2
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "syncfree"
    message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    print(f"syncfree: {message} (see {command} --help)", file=sys.stderr)
    return 2


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; ends the process with one of the documented exit codes."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    code = 0
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # tables have signs that not every terminal's encoding has
    try:
        result = app(arguments, standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except SyncfreeError as error:
        if debug:
            raise
        print(f"syncfree: {error}", file=sys.stderr)
        code = error.exit_code
    except _USAGE as error:
        code = _usage(error)
    except (typer.Abort, KeyboardInterrupt):
        print("syncfree: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away: nothing is left to say, and nobody to say it to
        code = 0
    except Exception as error:
        if debug:
            raise
        print(f"syncfree: internal error: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
