"""The fenced blocks of a page, and what the comment before each says is to be done with it.

| comment | the block is |
|---|---|
| `<!-- run -->` | run: Python as a script, bash line by line; `run: exit 1` where it has to end so |
| `<!-- run: continues -->` | Python, run after the earlier Python blocks of the page |
| `<!-- output -->` | what the block before it printed |
| `<!-- prints -->` | lines that the block before it printed, among others |
| `<!-- file: NAME -->` | written to NAME |
| `<!-- needs: WHAT -->` | not run, since it needs a GPU or the like; `syncfree` lines have to parse |
| `<!-- picture -->` | no code: a figure in text |

Besides, on lines of their own: `<!-- copy: PATH as NAME -->` copies a file of the repository, `<!-- server: PROGRAM
ARGUMENTS -->` starts a program until the end of the page and waits for its socket.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
_COMMENT = re.compile(r"<!-- *(run|output|prints|file|needs|picture|copy|server)(?:: *(.*?))? *-->\s*$")
_FENCE = re.compile(r"^( *)(```+)(\w*)\s*$")


@dataclass(frozen=True)
class Action:
    """One thing to do. `kind`: a comment's word, or "unmarked"."""

    kind: str
    argument: str
    language: str
    text: str
    line: int


def actions(page: Path) -> list[Action]:
    """What the page asks for, in order."""
    found: list[Action] = []
    pending: tuple[str, str] | None = None
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), 1))
    for number, line in lines:
        comment, fence = _COMMENT.match(line.strip()), _FENCE.match(line)
        if comment and comment[1] in ("copy", "server"):
            found.append(Action(comment[1], comment[2], "", "", number))
        elif comment:
            pending = (comment[1], comment[2] or "")
        elif fence:
            indent, closing, language = fence.groups()
            body = []
            for _, inner in lines:
                if inner.strip() == closing:
                    break
                body.append(inner.removeprefix(indent))
            kind, argument = pending or ("unmarked", "")
            found.append(Action(kind, argument, language, "\n".join(body) + "\n", number))
            pending = None
        elif line.strip():
            pending = None
    return found
