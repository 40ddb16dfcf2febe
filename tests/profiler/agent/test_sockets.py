import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from syncfree.planner.errors import BadInput, Unreachable
from syncfree.profiler.agent import sockets

STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a file of another user")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "agents"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def listening():
    """Makes listening sockets; they are closed at the end."""
    made = []

    def listen(path):
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.listen(4)
        made.append(server)
        return server

    yield listen
    for server in made:
        server.close()


def leave_stale(path):
    """A socket file whose server has ended."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(1)
    server.close()


def dead_pid():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


# ------------------------------------------------------------- where sockets are


def test_the_directory_is_the_named_one_then_the_runtime_one_then_tmp(monkeypatch, tmp_path):
    monkeypatch.setenv("SYNCFREE_SOCKET_DIR", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert sockets.socket_directory() == tmp_path / "named"
    monkeypatch.delenv("SYNCFREE_SOCKET_DIR")
    assert sockets.socket_directory() == tmp_path / "syncfree"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert sockets.socket_directory() == Path(f"/tmp/syncfree-{os.geteuid()}")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert sockets.socket_directory() == Path(f"/tmp/syncfree-{os.geteuid()}")


def test_a_new_directory_is_private(tmp_path):
    sockets.prepare_directory(tmp_path / "new")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o600])
def test_a_directory_that_others_may_enter_is_refused(folder, mode):
    folder.chmod(mode)
    with pytest.raises(Unreachable, match=rf"expected mode 0700, got {mode:04o}"):
        sockets.claim(folder / "1-0.sock")
    assert not (folder / "1-0.sock.lock").exists()


def test_a_directory_that_is_a_link_is_refused(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(Unreachable, match="expected a directory, got a symbolic link"):
        sockets.claim(tmp_path / "link" / "1-0.sock")


def test_a_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(Unreachable, match="expected a directory, got a regular file"):
        sockets.claim(tmp_path / "file" / "1-0.sock")
    assert (tmp_path / "file").read_text() == "mine"


@as_root
def test_a_directory_of_another_user_is_refused(folder):
    os.chown(folder, STRANGER, STRANGER)
    with pytest.raises(Unreachable, match=f"expected a directory of uid 0, got one of uid {STRANGER}"):
        sockets.claim(folder / "1-0.sock")


def test_a_directory_in_a_place_where_everybody_may_rename_it_is_refused(tmp_path):
    open_place = tmp_path / "open"
    open_place.mkdir()
    open_place.chmod(0o777)
    with pytest.raises(Unreachable, match="everybody may replace files in it"):
        sockets.claim(open_place / "agents" / "1-0.sock")


# ----------------------------------------------------------------------- binding


def test_a_claimed_socket_is_private_and_goes_with_its_lock(folder, listening):
    path = folder / "1-0.sock"
    claim = sockets.claim(path)
    listening(path)
    claim.secure()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    claim.release()
    assert list(folder.iterdir()) == []


def test_a_path_of_107_bytes_is_refused_and_one_of_106_is_taken(folder):
    room = 106 - len(os.fsencode(folder)) - 1
    claim = sockets.claim(folder / ("a" * room))
    claim.release()
    with pytest.raises(BadInput, match="expected a socket path under 107 bytes, got 107"):
        sockets.claim(folder / ("a" * (room + 1)))


def test_the_length_is_counted_in_bytes(folder):
    room = 106 - len(os.fsencode(folder)) - 1
    with pytest.raises(BadInput, match="under 107 bytes"):
        sockets.claim(folder / ("é" * room))


def test_a_regular_file_in_the_way_is_kept(folder):
    path = folder / "1-0.sock"
    path.write_text("precious")
    with pytest.raises(Unreachable, match="got a regular file"):
        sockets.claim(path)
    assert path.read_text() == "precious"
    assert sorted(p.name for p in folder.iterdir()) == ["1-0.sock"]


def test_a_link_in_the_way_is_kept_and_not_followed(folder, tmp_path):
    (tmp_path / "elsewhere").write_text("precious")
    (folder / "1-0.sock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unreachable, match="got a symbolic link"):
        sockets.claim(folder / "1-0.sock")
    assert (tmp_path / "elsewhere").read_text() == "precious"


def test_a_lock_that_is_a_link_is_not_followed(folder, tmp_path):
    (folder / "1-0.sock.lock").symlink_to(tmp_path / "made")
    with pytest.raises(Unreachable, match="cannot be opened"):
        sockets.claim(folder / "1-0.sock")
    assert not (tmp_path / "made").exists()


def test_a_live_socket_is_not_taken_over(folder, listening):
    server = listening(folder / "1-0.sock")
    with pytest.raises(Unreachable, match="a live server listens there"):
        sockets.claim(folder / "1-0.sock")
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(folder / "1-0.sock"))
    server.accept()[0].close()
    client.close()


def test_a_locked_path_is_not_taken_over_before_its_owner_has_bound(folder):
    claim = sockets.claim(folder / "1-0.sock")
    with pytest.raises(Unreachable, match="a live server holds this socket"):
        sockets.claim(folder / "1-0.sock")
    claim.release()


def test_a_stale_socket_is_replaced(folder, listening):
    leave_stale(folder / "1-0.sock")
    claim = sockets.claim(folder / "1-0.sock")
    assert not (folder / "1-0.sock").exists()
    listening(folder / "1-0.sock")
    claim.release()


@as_root
def test_a_socket_of_another_user_is_kept(folder):
    leave_stale(folder / "1-0.sock")
    os.chown(folder / "1-0.sock", STRANGER, STRANGER)
    with pytest.raises(Unreachable, match=f"a socket of uid {STRANGER} is in the way"):
        sockets.claim(folder / "1-0.sock")
    assert (folder / "1-0.sock").exists()


def test_release_leaves_a_socket_alone_that_is_not_the_one_we_bound(folder, listening):
    path = folder / "1-0.sock"
    claim = sockets.claim(path)
    listening(path)
    claim.secure()
    path.unlink()
    listening(path)
    claim.release()
    assert path.exists()


def test_a_forked_child_neither_removes_the_socket_nor_keeps_its_lock(folder, listening):
    path = folder / "1-0.sock"
    claim = sockets.claim(path)
    listening(path)
    claim.secure()
    pid = os.fork()
    if pid == 0:
        claim.release()
        claim.forget()
        signal.pause()
        os._exit(0)
    try:
        assert path.exists()
        claim.release()
        sockets.claim(path).release()  # the child holds no lock that outlives ours
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# ------------------------------------------------------------ looking at a target


def test_a_target_that_is_missing(folder):
    with pytest.raises(Unreachable, match=r"no such socket"):
        sockets.check_target(folder / "1-0.sock")


def test_a_target_that_is_a_file(folder):
    (folder / "1-0.sock").write_text("")
    with pytest.raises(Unreachable, match="expected a socket, got a regular file"):
        sockets.check_target(folder / "1-0.sock")


def test_a_target_below_a_file(folder):
    (folder / "file").write_text("")
    with pytest.raises(Unreachable, match="no such socket"):
        sockets.check_target(folder / "file" / "1-0.sock")


def test_a_target_that_is_a_link_even_to_a_live_socket(folder, listening):
    listening(folder / "1-0.sock")
    (folder / "2-0.sock").symlink_to(folder / "1-0.sock")
    with pytest.raises(Unreachable, match="expected a socket, got a symbolic link"):
        sockets.check_target(folder / "2-0.sock")


def test_a_target_whose_server_has_ended(folder):
    leave_stale(folder / "1-0.sock")
    with pytest.raises(Unreachable, match="nothing listens there"):
        sockets.check_target(folder / "1-0.sock")


def test_a_target_whose_path_is_too_long(folder):
    with pytest.raises(BadInput, match="under 107 bytes"):
        sockets.check_target(folder / ("a" * 200))


@as_root
def test_root_may_use_a_socket_of_another_user_that_this_user_listens_on(folder, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, STRANGER, STRANGER)
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == 0 and not above.stat().st_mode & 0o001:
            above.chmod(0o711)
    path = theirs / "1-0.sock"
    program = (
        "import os, socket, signal\n"
        f"os.setgid({STRANGER}); os.setuid({STRANGER})\n"
        f"s = socket.socket(socket.AF_UNIX); s.bind({str(path)!r}); s.listen(4)\n"
        "print('up', flush=True); signal.pause()\n"
    )
    server = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout.readline() == "up\n"
        sockets.check_target(path)
        assert sockets.listener(path) == (server.pid, STRANGER)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@as_root
def test_a_stranger_may_not_use_our_socket(folder, listening):
    listening(folder / "1-0.sock")
    folder.chmod(0o755)  # even where the folder lets him look
    for above in folder.parents:
        if above.stat().st_uid == 0 and not above.stat().st_mode & 0o001:
            above.chmod(0o711)
    pid = os.fork()
    if pid == 0:
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        try:
            sockets.check_target(folder / "1-0.sock")
        except Unreachable as error:
            os._exit(0 if "belongs to uid 0: only that user and root" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0


# -------------------------------------------------------------------- discovering


def test_live_sockets_are_found_by_pid_and_rank_and_others_are_not(folder, listening):
    for name in (f"{os.getpid()}-3.sock", f"{os.getpid()}-0.sock", "notes.sock", f"{os.getpid()}-x.sock"):
        listening(folder / name)
    (folder / f"{os.getpid()}-9.sock").write_text("a file")
    found = sockets.discover(folder)
    assert [(a.pid, a.rank, a.uid) for a in found] == [(os.getpid(), rank, os.geteuid()) for rank in (0, 3)]


def test_stale_sockets_are_removed_with_their_locks(folder, listening):
    gone = dead_pid()
    leave_stale(folder / f"{gone}-0.sock")
    (folder / f"{gone}-0.sock.lock").write_text("")
    (folder / f"{gone}-1.sock.lock").write_text("")
    leave_stale(folder / f"{os.getpid()}-0.sock")  # a living process that has ended its agent, or a zombie
    leave_stale(folder / "notes.sock")
    (folder / "other").write_text("kept")
    assert sockets.discover(folder) == []
    assert sorted(p.name for p in folder.iterdir()) == ["notes.sock", "other"]


def test_a_path_that_is_claimed_but_not_bound_yet_is_not_stale(folder):
    claim = sockets.claim(folder / "1-0.sock")
    leave_stale(folder / "1-0.sock")
    assert sockets.clean_stale(folder) == []
    assert (folder / "1-0.sock").exists()
    claim.release()


def test_a_socket_that_somebody_listens_on_stays_though_its_pid_is_unknown_here(folder, listening):
    gone = dead_pid()
    listening(folder / f"{gone}-0.sock")  # a container's process, seen through a shared folder
    assert [a.pid for a in sockets.discover(folder)] == [gone]


def test_no_folder_means_no_agents(tmp_path):
    assert sockets.discover(tmp_path / "missing") == []


@as_root
def test_discovery_removes_nothing_in_a_folder_of_another_user(folder):
    gone = dead_pid()
    leave_stale(folder / f"{gone}-0.sock")
    os.chown(folder, STRANGER, STRANGER)
    assert sockets.discover(folder) == []
    assert (folder / f"{gone}-0.sock").exists()
