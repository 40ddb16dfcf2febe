"""`profile --url` without our plugin: vLLM's own `/start_profile` and `/stop_profile`, and the trace files they write.

Only for a server on this machine: where its files lie, and how they are recorded, stands in its command line.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from ...errors import BadInput, NothingMeasured, Unreachable
from ...profiler.agent.relay import NoPlugin, post
from ...profiler.attach.processes import Process, read_process, seen_from_here
from ...profiler.readers import read_traces
from ...profiler.report import Note, Report

ANSWER_SECONDS = 300.0  # stop_profile answers once the files are written
WRITTEN_SECONDS = 60.0
_POLL_SECONDS = 0.1
_FILES = "*.pt.trace.json*"
MEND = "restart it with VLLM_PLUGINS=syncfree and SYNCFREE_TOKEN set, or profile it by --pid"


class Profiling(NamedTuple):
    """What a server's command line says of its profiler."""

    folder: Path | None
    with_stack: bool


def profile_traced(
    url: str,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Report:
    """Let the server write a trace for `seconds` (or of `steps` steps), and read it.

    Raises `Unreachable` where the server is not on this machine, has no profiler, or would record Python stacks: with
    those, fifty steps were seen to stop a server for three minutes.
    """
    folder = _folder(url)
    before = _written(folder)
    body = {} if steps is None else {"max_iterations": steps}
    headers = {"Content-Type": "application/json"}
    try:
        post(f"{url}/start_profile", json.dumps(body).encode(), headers, ANSWER_SECONDS)
    except NoPlugin:
        raise Unreachable(f"{url}: has neither syncfree's endpoint nor /start_profile: {MEND}") from None
    interrupted = False
    try:
        _wait(lambda: _written(folder) - before, steps, seconds, progress)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        post(f"{url}/stop_profile", b"", headers, ANSWER_SECONDS)
    files = sorted(_written(folder) - before)
    if not files:
        raise NothingMeasured(f"{folder}: the server wrote no trace: did it get requests meanwhile?")
    try:
        report = read_traces(files)
    except BadInput as error:
        raise NothingMeasured(str(error)) from None
    report.notes.append(Note(kind="attach", text=f"read from {', '.join(path.name for path in files)} in {folder}"))
    report.source.partial = report.source.partial or interrupted
    return report


def _wait(
    new_files: Callable[[], set[Path]],
    steps: int | None,
    seconds: float | None,
    progress: Callable[[int, float], None] | None,
) -> None:
    """Until the time is up; with `steps`, until the server has written its file by itself."""
    began = time.monotonic()
    longest = seconds if seconds is not None else WRITTEN_SECONDS
    while (passed := time.monotonic() - began) < longest and not (steps is not None and new_files()):
        if progress is not None:
            progress(0, passed)
        time.sleep(min(_POLL_SECONDS, longest - passed))


def _written(folder: Path) -> set[Path]:
    return set(folder.rglob(_FILES))


def _folder(url: str) -> Path:
    server = listening(url)
    if server is None:
        raise Unreachable(f"{url}: has no syncfree endpoint, and its trace files are not on this machine: {MEND}")
    told = profiling_of(server)
    if told.folder is None:
        raise Unreachable(f"{url}: has no syncfree endpoint, and its command line names no trace folder: {MEND}")
    if told.with_stack:
        how = "--profiler-config.torch_profiler_with_stack false"
        raise Unreachable(f"{url}: its profiler would record Python stacks, which stops it for minutes: use {how}")
    return seen_from_here(server.pid, told.folder)


def listening(url: str) -> Process | None:
    """The process on this machine that listens at the URL's port; None if there is none, or the host is another."""
    parts = urlsplit(url)
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(parts.hostname, None)}
        for address in addresses:  # only an address of this machine can be bound
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.bind((address, 0))
    except OSError:
        return None
    inodes = _inodes(parts.port or (443 if parts.scheme == "https" else 80))
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and inodes and _holds(entry, inodes):
            return read_process(int(entry.name))
    return None


def _inodes(port: int) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:  # 0A: listening
                found.add(f"socket:[{fields[9]}]")
    return found


def _holds(process: Path, inodes: set[str]) -> bool:
    try:
        return any(os.readlink(entry) in inodes for entry in os.scandir(process / "fd"))  # noqa: PTH115 - one a file
    except OSError:
        return False


def profiling_of(server: Process) -> Profiling:
    """What its command line and environment say; vLLM records stacks unless told not to."""
    try:
        arguments = Path(f"/proc/{server.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        environ = Path(f"/proc/{server.pid}/environ").read_bytes().decode(errors="replace").split("\0")
        here = Path(f"/proc/{server.pid}/cwd").readlink()
    except OSError as error:
        raise Unreachable(f"process {server.pid}: its command line cannot be read: {error.strerror}") from None
    variables = dict(entry.split("=", 1) for entry in environ if "=" in entry)
    settings = _settings(arguments)
    folder = settings.get("torch_profiler_dir") or variables.get("VLLM_TORCH_PROFILER_DIR")
    stacks = settings.get("torch_profiler_with_stack", variables.get("VLLM_TORCH_PROFILER_WITH_STACK", "1"))
    return Profiling(here / folder if folder else None, str(stacks).lower() not in ("0", "false"))


def _settings(arguments: list[str]) -> dict[str, str]:
    """`--profiler-config JSON`, `--profiler-config.NAME VALUE`, each with a space or `=`, with - or _."""
    found: dict[str, str] = {}
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        name = name.lstrip("-").replace("-", "_")
        following = arguments[at + 1] if at + 1 < len(arguments) else ""
        value = value if equals else following
        if not argument.startswith("--") or not name.startswith("profiler_config"):
            continue
        if name == "profiler_config":
            try:
                found.update({key: str(item) for key, item in json.loads(value).items()})
            except (ValueError, AttributeError):
                continue  # not what vLLM takes: it would not have started
        else:
            found[name.partition(".")[2]] = value
    return found
