"""Writing a file whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from ..errors import BadInput

_OPEN_FILES = ("/dev/stdout", "/dev/stderr", "/dev/fd", "/proc")


def check_writable(path: Path) -> None:
    """Raises `BadInput` (one line) where `write_whole` would: asked before work whose result goes there."""
    folder = path.resolve().parent
    code = 0
    if path.is_dir():
        code = errno.EISDIR
    elif not is_special(path) and not folder.is_dir():
        code = errno.ENOTDIR if folder.exists() else errno.ENOENT
    elif not os.access(path if is_special(path) else folder, os.W_OK):
        code = errno.EACCES
    if code:
        raise BadInput(f"{path}: cannot be written: {os.strerror(code)}")


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path` through a temporary file beside it, so that a reader never sees half of it.

    A device or a pipe (`/dev/stdout`) is written to, not replaced; a link stays one. Raises `BadInput` (one line)
    where the folder is missing or may not be written to.
    """
    try:
        if is_special(path):
            with open(path, "ab") as device:
                device.write(data)
            return
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from error
    given, path = path, path.resolve()
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise BadInput(f"{given}: cannot be written: {error.strerror}") from error
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
        raise BadInput(f"{given}: cannot be written: {error.strerror}") from error


def is_special(path: Path) -> bool:
    """A device, a pipe, a name of an open file (`/dev/stdout`, also where that is redirected to a file)."""
    return any(path.is_relative_to(name) for name in _OPEN_FILES) or (path.exists() and not path.is_file())
