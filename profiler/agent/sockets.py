"""Where agents listen: one directory of our own, one Unix socket per worker, and the rules that keep both safe.

ZeroMQ's own bind takes over a live socket, replaces a regular file and leaves the result open to everybody; its
connect to nothing never fails. So a path is locked, looked at and probed before ZeroMQ sees it, on both sides.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import struct
from pathlib import Path
from typing import NamedTuple

from ...errors import BadInput, Unreachable

DIRECTORY_VARIABLE = "SYNCFREE_SOCKET_DIR"
PATH_LIMIT = 107  # sun_path holds 108 bytes with its end; one is left in hand
_NAME = re.compile(r"(?P<pid>[1-9][0-9]{0,9})-(?P<rank>[0-9]{1,6})\.sock")
_PROBE_SECONDS = 1.0


class Address(NamedTuple):
    """A live agent's socket."""

    path: Path
    pid: int
    rank: int
    uid: int


def socket_directory() -> Path:
    """`$SYNCFREE_SOCKET_DIR`, else `$XDG_RUNTIME_DIR/syncfree`, else `/tmp/syncfree-<uid>`."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime).absolute() / "syncfree"
    return Path(f"/tmp/syncfree-{os.geteuid()}")


def worker_path(rank: int, pid: int | None = None, directory: Path | None = None) -> Path:
    """The socket of one worker process: `<pid>-<rank>.sock`."""
    return (directory or socket_directory()) / f"{os.getpid() if pid is None else pid}-{rank}.sock"


def check_length(path: Path) -> None:
    """Raises `BadInput` where the kernel could not hold the path (it would be cut, or refused late)."""
    size = len(os.fsencode(path))
    if size >= PATH_LIMIT:
        raise BadInput(f"{path}: expected a socket path under {PATH_LIMIT} bytes, got {size}: choose a shorter one")
    if "\0" in str(path):
        raise BadInput(f"{str(path)!r}: expected a socket path without a NUL byte")


# ---------------------------------------------------------------- the directory


def prepare_directory(path: Path) -> None:
    """Make the directory (0700), or check that it is really ours. Raises `Unreachable` where it is not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # a file or a link: the check below says what it is
    except OSError as error:
        raise Unreachable(f"{path}: cannot make the socket directory: {error.strerror}") from error
    check_directory(path)


def check_directory(path: Path) -> None:
    """Raises `Unreachable` unless `path` is a directory (no link), owned by us, mode 0700."""
    found = _look(path)
    if found is None:
        raise Unreachable(f"{path}: no such directory")
    if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
        raise Unreachable(f"{path}: expected a directory, got {_kind(found)}")
    if found.st_uid != os.geteuid():
        raise Unreachable(f"{path}: expected a directory of uid {os.geteuid()}, got one of uid {found.st_uid}")
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_mode & 0o700 != 0o700:
        mode = stat.S_IMODE(found.st_mode)
        raise Unreachable(f"{path}: expected mode 0700, got {mode:04o}: chmod 700 it, or choose another directory")
    above = path.parent.stat()
    if above.st_mode & 0o002 and not above.st_mode & stat.S_ISVTX:
        raise Unreachable(f"{path.parent}: everybody may replace files in it: choose another directory for sockets")


# ---------------------------------------------------------------------- binding


class Claim:
    """The right to bind one path: its lock is held until `release`. Not inherited by a forked child."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.endpoint = f"ipc://{path}"
        self._lock = lock
        self._pid = os.getpid()
        self._bound: tuple[int, int] | None = None

    def secure(self) -> None:
        """After bind: 0600, and remember which file is ours."""
        self.path.chmod(0o600)
        found = self.path.lstat()
        self._bound = (found.st_dev, found.st_ino)

    def release(self) -> None:
        """Remove the socket (only the one that we bound) and the lock. Nothing in a forked child."""
        if self._pid != os.getpid() or self._lock < 0:
            return
        found = _look(self.path)
        if found is not None and self._bound == (found.st_dev, found.st_ino):
            self.path.unlink(missing_ok=True)
        _lock_path(self.path).unlink(missing_ok=True)  # still locked: nobody can be using it
        os.close(self._lock)
        self._lock = -1

    def forget(self) -> None:
        """In a forked child: close the inherited descriptor, so that the lock ends with its owner."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = -1


def claim(path: Path) -> Claim:
    """Lock `path` and make sure that binding it harms nobody; a stale socket there is removed.

    Raises `BadInput` for a path that is too long, `Unreachable` where the directory is not ours (0700), where
    something else than a socket is in the way, or where a live server listens.
    """
    path = path.absolute()
    check_length(path)
    prepare_directory(path.parent)
    lock = _take_lock(path)
    if lock is None:
        raise Unreachable(f"{path}: a live server holds this socket")
    try:
        found = _look(path)
        if found is not None:
            if not stat.S_ISSOCK(found.st_mode):
                raise Unreachable(f"{path}: expected a free path or an old socket, got {_kind(found)}")
            if found.st_uid != os.geteuid():
                raise Unreachable(f"{path}: a socket of uid {found.st_uid} is in the way")
            if probe(path) is None:
                raise Unreachable(f"{path}: a live server listens there")
            path.unlink(missing_ok=True)
    except BaseException:
        _lock_path(path).unlink(missing_ok=True)
        os.close(lock)
        raise
    return Claim(path, lock)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _take_lock(path: Path) -> int | None:
    """An exclusive lock beside `path`; None where somebody holds it."""
    beside = _lock_path(path)
    while True:
        try:
            lock = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Unreachable(f"{beside}: cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        found, mine = _look(beside), os.fstat(lock)
        if found is not None and (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
            return lock
        os.close(lock)  # its owner removed it between our open and our lock: what we locked has no name any more


# ------------------------------------------------------------------- connecting


def probe(path: Path) -> str | None:
    """None where something listens at `path`, else the reason why nothing can be reached. Sends nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(_PROBE_SECONDS)
        try:
            trial.connect(os.fspath(path))
        except ConnectionRefusedError:
            return "nothing listens there (its server has ended)"
        except TimeoutError:
            return None  # the queue of a listening socket is full: it lives
        except BlockingIOError:
            return None
        except OSError as error:
            return error.strerror or str(error)
    return None


def listener(path: Path) -> tuple[int, int] | None:
    """Process id and user id of whoever listens at `path`, as the kernel knows them; None where nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(_PROBE_SECONDS)
        try:
            trial.connect(os.fspath(path))
            pid, uid, _ = struct.unpack("3i", trial.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return None
    return pid, uid


def check_target(path: Path, *, hint: str = "is the server running, with syncfree in it?") -> None:
    """Raises `Unreachable` (one line, with the reason) unless a server of ours listens at `path`; root may use any.

    `hint`: what to look at where there is no such socket.
    """
    path = path.absolute()
    check_length(path)
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise Unreachable(f"{path}: no such socket: {hint}") from None
    except OSError as error:
        raise Unreachable(f"{path}: {error.strerror}: only the server's own user and root may use it") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise Unreachable(f"{path}: expected a socket, got {_kind(found)}")
    if os.geteuid() not in (0, found.st_uid):
        raise Unreachable(f"{path}: belongs to uid {found.st_uid}: only that user and root may use it")
    reason = probe(path)
    if reason is not None:
        raise Unreachable(f"{path}: {reason}")
    peer = listener(path)
    if peer is not None and peer[1] not in (found.st_uid, 0):
        raise Unreachable(f"{path}: its owner is uid {found.st_uid}, but uid {peer[1]} listens there")


def discover(directory: Path | None = None) -> list[Address]:
    """Live agents, by pid and rank; stale sockets are removed. Without a directory root sees those of every user."""
    folders = [directory] if directory is not None else [socket_directory()]
    if directory is None and os.geteuid() == 0 and not os.environ.get(DIRECTORY_VARIABLE):
        folders += [*Path("/tmp").glob("syncfree-[0-9]*"), *Path("/run/user").glob("[0-9]*/syncfree")]
    found: set[Address] = set()
    for folder in folders:
        about = _look(folder)
        if about is None or not stat.S_ISDIR(about.st_mode) or os.geteuid() not in (0, about.st_uid):
            continue
        if about.st_uid == os.geteuid():
            clean_stale(folder)
        found.update(_live(folder))
    return sorted(found, key=lambda a: (a.uid, a.pid, a.rank))


def _live(folder: Path) -> list[Address]:
    found = []
    for path in _entries(folder):
        name, about = _NAME.fullmatch(path.name), _look(path)
        if name and about is not None and stat.S_ISSOCK(about.st_mode) and probe(path) is None:
            found.append(Address(path, int(name["pid"]), int(name["rank"]), about.st_uid))
    return found


def clean_stale(folder: Path) -> list[Path]:
    """Remove the sockets in our own `folder` where nothing listens and whose lock nobody holds. Returns their paths.

    The process id in the name decides nothing: a zombie has one still, another container has its own count of them.
    """
    removed = []
    for path in dict.fromkeys(path.with_name(path.name.removesuffix(".lock")) for path in _entries(folder)):
        about = _look(path)
        if _NAME.fullmatch(path.name) is None or (about is not None and not stat.S_ISSOCK(about.st_mode)):
            continue
        if about is not None and probe(path) is None:
            continue
        lock = _take_lock(path)
        if lock is None:
            continue
        if about is not None and probe(path) is not None:
            path.unlink(missing_ok=True)
            removed.append(path)
        _lock_path(path).unlink(missing_ok=True)
        os.close(lock)
    return removed


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _look(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None


def _kind(about: os.stat_result) -> str:
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFREG: "a regular file",
        stat.S_IFDIR: "a directory",
        stat.S_IFSOCK: "a socket",
        stat.S_IFIFO: "a pipe",
    }
    return kinds.get(stat.S_IFMT(about.st_mode), "a special file")
