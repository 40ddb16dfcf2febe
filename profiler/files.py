"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ..errors import BadInput


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path` through a temporary file beside it, so that a reader never sees half of it.

    Raises `BadInput` (one line) where the folder is missing or may not be written to.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from error
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes 0600; a report is as readable as any file
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from error
