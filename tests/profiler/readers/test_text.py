"""Unpacking within bounds."""

import gzip
import os
import zlib

import pytest
from syncfree.planner.errors import BadInput
from syncfree.profiler.readers.text import Limits, Text, head_of

MIB = 1 << 20


def write(tmp_path, data, name="t"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


def read(path, **limits):
    text = Text(path, Limits(**limits))
    return b"".join(text), text


@pytest.mark.parametrize("size", [0, 1, 4096, (512 << 10) - 1, 512 << 10, 3 * MIB + 7])
@pytest.mark.parametrize("pack", [lambda d: d, lambda d: gzip.compress(d, mtime=0)], ids=["plain", "gzip"])
def test_the_text_comes_whole(tmp_path, size, pack):
    data = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    found, text = read(write(tmp_path, pack(data)))
    assert found == data
    assert (text.truncated, text.damaged) == (False, "")


def test_streams_one_behind_the_other_and_padding(tmp_path):
    packed = gzip.compress(b"one ", mtime=0) + gzip.compress(b"two", mtime=0) + b"\0" * 300_000
    found, text = read(write(tmp_path, packed))
    assert (found, text.truncated) == (b"one two", False)


@pytest.mark.parametrize("cut", [1, 8, 9, 200])
def test_a_cut_stream_is_told_from_a_whole_one(tmp_path, cut):
    data = os.urandom(5000)
    found, text = read(write(tmp_path, gzip.compress(data, mtime=0)[:-cut]))
    assert text.truncated
    assert data.startswith(found)


def test_a_damaged_stream_gives_what_came_before(tmp_path):
    data = os.urandom(3 * MIB)
    packed = bytearray(gzip.compress(data, 1, mtime=0))
    packed[len(packed) // 2] ^= 0xFF
    packed[-5] ^= 0xFF
    found, text = read(write(tmp_path, bytes(packed)))
    assert text.damaged
    assert len(found) < len(data)


def bomb(path, chunk, count):
    packer = zlib.compressobj(9, wbits=31)
    with path.open("wb") as file:
        for _ in range(count):
            file.write(packer.compress(chunk))
        file.write(packer.flush())
    return path


def test_a_bomb_is_left_at_the_ratio(tmp_path):
    path = bomb(tmp_path / "b.gz", b"[" * MIB, 400)
    with pytest.raises(BadInput, match="unpacks to more than 200 times its size") as error:
        read(path)
    assert "\n" not in str(error.value)


def test_the_size_limit_holds_for_plain_files_too(tmp_path):
    with pytest.raises(BadInput, match="at most 2 MiB"):
        read(write(tmp_path, b"x" * (3 * MIB)), unpacked=2 * MIB)


def test_what_has_no_end_is_not_opened(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, "/dev/zero", tmp_path):
        with pytest.raises(BadInput, match="expected a file"):
            read(type(tmp_path)(path))
    with pytest.raises(BadInput, match="No such file"):
        read(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "an empty file"),
        (gzip.compress(b"", mtime=0), "an empty file"),
        (gzip.compress(b"x", mtime=0)[:10], "ends at once"),
    ],
)
def test_no_head_says_why(tmp_path, data, why):
    with pytest.raises(BadInput, match=why):
        head_of(write(tmp_path, data))
