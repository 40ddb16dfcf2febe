"""Every command and every piece of code in the documentation is run; what needs a GPU is parsed at least."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from snippets import PAGES, ROOT, Action, actions
from syncfree import cli
from syncfree.profiler.agent import sockets

pytestmark = pytest.mark.timeout(900)
NEEDS = ("a GPU", "a live vLLM", "vLLM", "a checkout", "a registry", "an engine")
SECONDS = 250


class Page:
    """A folder, an environment and the programs of one page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python: list[str] = []
        self.printed = ""
        self.servers: list[subprocess.Popen] = []
        bin_folder = Path(sys.executable).parent
        self.environment = {
            **os.environ,
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "SYNCFREE_SOCKET_DIR": str(folder / "sockets"),
            "COLUMNS": "160",
            "PYTEST_ADDOPTS": "-p no:cacheprovider -p no:xdist",
        }

    def do(self, action: Action) -> None:
        getattr(self, f"_{action.kind}")(action)

    def _run(self, action: Action) -> None:
        code = 0
        if action.argument.startswith("exit"):
            code = int(action.argument.split()[1])
        if action.language == "python":
            before = "".join(self.python) if action.argument == "continues" else ""
            self.python.append(action.text)
            program = self.folder / f"block_{action.line}.py"
            program.write_text(before + action.text)
            command = [sys.executable, program.name]
        else:
            assert action.language == "bash", f"line {action.line}: only Python and bash are run"
            command = ["bash", "-euo", "pipefail", "-c", action.text]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        self.printed = done.stdout
        assert done.returncode == code, f"line {action.line}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"

    def _output(self, action: Action) -> None:
        wanted = [line.rstrip() for line in action.text.splitlines()]
        got = [line.rstrip() for line in self.printed.splitlines()]
        if "..." in wanted:  # a cut: what stands before and after it has to be there
            cut = wanted.index("...")
            tail = wanted[cut + 1 :]
            got = got[:cut] + ["..."] + (got[-len(tail) :] if tail else [])
        assert got == wanted, f"line {action.line}: printed\n{self.printed}"

    def _prints(self, action: Action) -> None:
        for line in action.text.splitlines():
            assert line.strip() in self.printed, f"line {action.line}: {line.strip()!r} is not in\n{self.printed}"

    def _file(self, action: Action) -> None:
        target = self.folder / action.argument
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(action.text)

    def _copy(self, action: Action) -> None:
        source, _, name = action.argument.partition(" as ")
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, target)

    def _server(self, action: Action) -> None:
        program, *arguments = shlex.split(action.argument)
        command = [sys.executable, str(ROOT / program), *arguments]
        self.servers.append(subprocess.Popen(command, cwd=self.folder, env=self.environment))
        until = time.monotonic() + 120
        while not sockets.discover(self.folder / "sockets") and time.monotonic() < until:
            assert self.servers[-1].poll() is None, "the server ended"
            time.sleep(0.1)

    def _needs(self, action: Action) -> None:
        assert action.argument in NEEDS, f"line {action.line}: needs: expected one of {NEEDS}"
        if action.language == "python":
            compile(action.text, f"line {action.line}", "exec")
        if action.language == "toml":
            tomllib.loads(action.text)
        for words in commands(action.text) if action.language == "bash" else ():
            parse(words, action.line)

    def _picture(self, action: Action) -> None:
        assert action.language in ("", "text"), f"line {action.line}: code is no picture"

    def _unmarked(self, action: Action) -> None:
        raise AssertionError(f"line {action.line}: say in a comment before the block what is to be done with it")

    def close(self) -> None:
        for server in self.servers:
            server.terminate()
            server.wait(30)


def commands(text: str) -> list[list[str]]:
    """The words of each `syncfree` command in a piece of bash."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            cut = next((i for i, word in enumerate(words) if word in ("&&", "|", ";", "&", ">", ">>")), len(words))
            if words[:1] == ["syncfree"]:
                found.append(words[1:cut])
            words = words[cut + 1 :]
    return found


def parse(words: list[str], line: int) -> None:
    """Whether the command line takes these words; nothing is run."""
    group = typer.main.get_command(cli.app)
    name = words[0] if words else ""
    command = group.commands.get(name)
    assert command is not None, f"line {line}: no command {name!r}"
    try:
        command.make_context(name, list(words[1:]))
    except cli._USAGE as error:
        raise AssertionError(f"line {line}: syncfree {shlex.join(words)}: {error.format_message()}") from error


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES])
def test_a_page_does_what_it_says(page, tmp_path):
    todo = actions(page)
    with contextlib.closing(Page(tmp_path)) as running:
        for before, action in zip([None, *todo], todo, strict=False):
            if not (before and before.kind == "needs" and action.kind in ("output", "prints")):
                running.do(action)


VLLM_BLOCKS = [
    pytest.param(actions(page), i, id=f"{page.stem}:{action.line}")
    for page in PAGES
    for i, action in enumerate(actions(page))
    if action.kind == "needs" and action.argument == "vLLM"
]


@pytest.mark.vllm
@pytest.mark.parametrize(("page", "index"), VLLM_BLOCKS)
def test_what_needs_vllm_is_run_where_it_is_installed(page, index, tmp_path):
    pytest.importorskip("vllm")
    running = Page(tmp_path)
    running.do(replace(page[index], kind="run", argument=""))
    if page[index + 1 :] and page[index + 1].kind in ("output", "prints"):
        running.do(page[index + 1])


def test_commands_are_found_in_bash():
    text = "syncfree check r.json --budget b.toml && syncfree diff \\\n  a b | tee x  # syncfree no\nFOO=1 make test\n"
    assert commands(text) == [["check", "r.json", "--budget", "b.toml"], ["diff", "a", "b"]]


def test_an_option_that_does_not_exist_is_found():
    with pytest.raises(AssertionError, match=r"line 7: syncfree profile --secs 3: No such option"):
        parse(["profile", "--secs", "3"], 7)
    with pytest.raises(AssertionError, match="no command 'prof'"):
        parse(["prof"], 1)


def test_a_block_without_a_word_about_it_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nprint(1)\n```\n")
    [action] = actions(page)
    with pytest.raises(AssertionError, match="line 3: say in a comment"):
        Page(tmp_path).do(action)


def test_an_output_that_is_not_what_was_printed_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- run -->\n```python\nprint(1)\n```\n\n<!-- output -->\n```text\n2\n```\n")
    first, second = actions(page)
    running = Page(tmp_path)
    running.do(first)
    with pytest.raises(AssertionError, match=r"line 7: printed\n +1"):
        running.do(second)
