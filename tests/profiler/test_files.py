"""Files are written whole or not at all, and never over what is no file."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from syncfree.errors import BadInput
from syncfree.profiler.files import check_writable, write_whole


def test_a_link_stays_a_link(tmp_path):
    target = tmp_path / "r.json"
    target.write_text("old")
    link = tmp_path / "latest.json"
    link.symlink_to(target.name)
    check_writable(link)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest.json", "r.json"]


def test_a_pipe_is_written_to_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    check_writable(pipe)
    write_whole(pipe, b"data")
    assert reader.communicate(timeout=60)[0] == b"data"
    assert pipe.is_fifo()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory to write to here")
def test_a_file_in_shared_memory_is_a_file():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "r.json"
        for data in (b"a longer one", b"new"):
            write_whole(path, data)
        assert path.read_bytes() == b"new"


@pytest.mark.parametrize("redirected", [False, True])
def test_standard_output_gets_the_data_beside_what_is_printed(tmp_path, redirected):
    code = "import pathlib, sys; from syncfree.profiler.files import check_writable, write_whole; "
    code += "print('before', flush=True); out = pathlib.Path('/dev/stdout'); "
    code += "check_writable(out); write_whole(out, b'data\\n')"
    if redirected:
        with open(tmp_path / "log", "wb") as log:
            subprocess.run([sys.executable, "-c", code], stdout=log, check=True)
        assert (tmp_path / "log").read_text() == "before\ndata\n"
    else:
        assert subprocess.check_output([sys.executable, "-c", code]) == b"before\ndata\n"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: folder / "missing" / "r.json", "No such file or directory"),
        (lambda folder: folder, "Is a directory"),
        (lambda folder: folder / "file" / "r.json", "Not a directory"),
    ],
)
def test_both_refuse_in_one_line(tmp_path, make, reason):
    (tmp_path / "file").write_text("")
    path = make(tmp_path)
    for attempt in (check_writable, lambda at: write_whole(at, b"")):
        with pytest.raises(BadInput, match=reason) as told:
            attempt(path)
        assert str(told.value).startswith(f"{path}: cannot be written: ")
