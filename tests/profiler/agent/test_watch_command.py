"""`syncfree watch` in a terminal and in a pipe, over several ranks."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

WATCH = [sys.executable, "-m", "syncfree.cli", "watch", "--interval", "0.3", "--collectors", "probe"]
COLOUR = re.compile(rb"\x1b\[[0-9;]*(3[0-7]|38|9[0-7])[0-9;]*m")
CONTROL = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def ranks(serve):
    for rank in range(3):
        serve("--rank", str(rank), "--counted")


class Terminal:
    """A command in a terminal of so many columns; `data` is all it wrote so far."""

    def __init__(self, command, columns, **environment):
        self.end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        variables = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        variables |= {"TERM": "xterm-256color", **environment}
        # A shell gives Ctrl-C its meaning back where it was ignored, as it is in a run that was started with nohup.
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            self.process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=variables)
        finally:
            signal.signal(signal.SIGINT, before)
        os.close(inner)
        self.data = b""

    def read_until(self, wanted, seconds=60):
        until = time.monotonic() + seconds
        while wanted not in self.data and time.monotonic() < until and self._read():
            pass
        return self.data

    def _read(self):
        if select.select([self.end], [], [], 1.0)[0]:
            try:
                chunk = os.read(self.end, 1 << 16)
            except OSError:  # the command has ended
                return False
            self.data += chunk
        return True

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)
        while self._read():
            pass
        os.close(self.end)
        return self.process.wait(30)


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_shows_classes_and_ranks_in_place_and_no_line_is_wider(ranks, columns):
    terminal = Terminal(WATCH, columns)
    data = terminal.read_until(b"ranks (3)")
    assert b"waiting for the first steps" in data
    assert terminal.interrupt() == 0
    text = CONTROL.sub(b"", terminal.data).decode()
    assert "causal_prefill" in text
    assert "stepping" in text
    assert max(len(line) for line in re.split(r"[\r\n]+", text)) <= columns
    assert COLOUR.search(terminal.data)
    assert terminal.data.rfind(b"\x1b[?25h") > terminal.data.rfind(b"\x1b[?25l")  # the cursor is back


def test_no_color_is_kept(ranks):
    terminal = Terminal(WATCH, 80, NO_COLOR="1")
    terminal.read_until(b"ranks (3)")
    assert terminal.interrupt() == 0
    assert not COLOUR.search(terminal.data)


def test_a_terminal_that_cannot_draw_over_gets_one_view_after_another(ranks):
    terminal = Terminal(WATCH, 80, TERM="dumb")
    terminal.read_until(b"ranks (3)")
    assert terminal.interrupt() == 0
    assert b"\x1b[1A" not in terminal.data


def test_a_pipe_gets_plain_text(ranks):
    done = subprocess.run([*WATCH, "--seconds", "1"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "ranks (3)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--pid", "4194303"], 3, "process 4194303 does not exist"),
        (["--url", "http://127.0.0.1:9"], 3, "http://127.0.0.1:9"),
        (["--url", "not a url"], 2, "expected http://HOST:PORT"),
        (["--pid", "1", "--url", "http://127.0.0.1:9"], 2, "expected one target, got --pid and --url"),
    ],
)
def test_what_cannot_be_watched_is_one_line(arguments, code, words):
    done = subprocess.run([*WATCH, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    (line,) = done.stderr.strip().splitlines()
    assert words in line
