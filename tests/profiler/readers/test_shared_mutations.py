"""Every trace made by others, damaged: a report with a note, or one line; never a traceback or a hang."""

import gzip
import random
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
from syncfree.planner.errors import BadInput
from syncfree.profiler.readers import Limits, read_traces
from syncfree.profiler.report import Report

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "traces"
FILES = sorted(p.name for p in FOLDER.glob("*") if p.suffix in (".gz", ".csv", ".sqlite")) or ["(no traces)"]
SMALL = Limits(unpacked=64 << 20, item=4 << 20, kept=64 << 20)
CUT = 150_000  # of a file's text: enough for every kind of record, and quick

NUMBER = rb"[\d.]+"


def damaged(text, rng):
    """(what was done, text) for a Kineto, rocprofv3 JSON or CSV text."""
    size = len(text)
    yield "cut in half", text[: size // 2]
    yield "cut anywhere", text[: rng.randrange(size)]
    yield "a comma before the end", re.sub(rb"\](\s*[,}])", rb",]\1", text, count=1)
    for value in (b"NaN", b'"x"', b"null", b"-1", b"1e400", b"9" * 40, b"{}", b"[[]]"):
        for field in (b"ts", b"dur", b"correlation", b"start_timestamp", b"bytes"):
            pattern = rb'"%s"\s*:\s*%s' % (field, NUMBER)
            if re.search(pattern, text):
                yield f"{field}: {value[:8]}", re.sub(pattern, b'"%s": %s' % (field, value), text)
                places = list(re.finditer(pattern, text))
                place = rng.choice(places)
                yield (
                    f"one {field}: {value[:8]}",
                    text[: place.start()] + b'"%s": %s' % (field, value) + text[place.end() :],
                )
    for field in (b'"ts"', b'"name"', b'"args"', b'"cat"', b'"ph"', b"Correlation_Id", b"Start_Timestamp"):
        if field in text:
            yield f"no {field}", text.replace(field, field[:-1] + b"_" + field[-1:])
    yield "numbers of other types", re.sub(rb'"name"\s*:\s*"[^"]*"', b'"name": 7', text, count=40)
    yield "bytes that are no text", text[: size // 3] + b"\xff\xfe\x00" + text[size // 3 :]
    for _ in range(4):
        noise = bytearray(text)
        for _ in range(rng.choice([1, 5, 50])):
            noise[rng.randrange(size)] = rng.randrange(256)
        yield "noise", bytes(noise)
    at, length = rng.randrange(size), rng.randrange(2000)
    yield "a piece lost", text[:at] + text[at + length :]
    yield "a piece twice", text[: at + length] + text[at:]
    yield "twice", text + text
    yield "a picture", b"\x89PNG\r\n\x1a\n" + text[:1000]
    yield "nothing", b""


def outcome(path, what):
    try:
        report = read_traces([path], limits=SMALL)
    except BadInput as error:
        line = str(error)
    else:
        line = ""
    assert "\n" not in line, what
    assert len(line) < 500, what
    if line:
        return None
    Report.from_json(report.to_json())
    return report


@pytest.mark.parametrize("name", FILES)
def test_damaged_text(shared, tmp_path, name):
    source = shared / name
    rng = random.Random(name)
    if source.suffix == ".sqlite":
        return
    whole = source.read_bytes()
    text = gzip.decompress(whole) if source.suffix == ".gz" else whole
    head, tail = text[:CUT], b""
    if source.suffix == ".gz" and len(text) > CUT and "rocprofv3" not in name:
        head, tail = text[: text.rindex(b"}", 0, text.rindex(b'"ph"', 0, CUT)) + 1], b"]}"
    path = tmp_path / (source.name.removesuffix(".gz"))
    for what, mutated in damaged(head + tail, rng):
        path.write_bytes(mutated)
        outcome(path, what)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".gz")] or ["(no traces)"])
def test_damaged_packing(shared, tmp_path, name):
    packed = (shared / name).read_bytes()
    path = tmp_path / name
    for cut in (len(packed) // 2, len(packed) - 1, 30, 2) if len(packed) < 500_000 else (len(packed) // 3, 30):
        path.write_bytes(packed[:cut])
        report = outcome(path, f"cut at {cut}")
        if report is not None:
            assert report.source.partial
    rng = random.Random(name)
    for _ in range(2 if len(packed) < 500_000 else 1):
        noise = bytearray(packed)
        noise[rng.randrange(20, len(packed))] ^= 0xFF
        path.write_bytes(noise)
        outcome(path, "noise in the packed data")
    if len(packed) < 500_000:
        path.write_bytes(packed + b"and something behind it")
        assert outcome(path, "something behind it") is not None


SQL = {
    "no kernels": "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL",
    "no calls": "DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME",
    "no strings": "DROP TABLE StringIds",
    "empty": "DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME",
    "text for a time": "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET start = 'soon'",
    "negative durations": "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET end = start - 10",
    "impossible times": "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 9223372036854775807",
    "ids that repeat": "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET correlationId = 1",
    "no ids": "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET correlationId = NULL",
    "no thread": "ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME RENAME COLUMN globalTid TO other",
    "no start": "ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME RENAME COLUMN start TO other",
    "bytes for a name": "UPDATE StringIds SET value = x'ff00'",
    "an endless view": "CREATE VIEW CUPTI_ACTIVITY_KIND_GRAPH_TRACE AS WITH RECURSIVE c(start, end) AS "
    "(SELECT 1, 2 UNION ALL SELECT start + 1, end + 1 FROM c) SELECT * FROM c",
}


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".sqlite")] or ["(no traces)"])
def test_damaged_databases(shared, tmp_path, name):
    source = shared / name
    path = tmp_path / "t.sqlite"
    for what, statement in SQL.items():
        shutil.copyfile(source, path)
        connection = sqlite3.connect(path)
        connection.execute(statement)
        connection.commit()
        connection.close()
        assert outcome(path, what) is not None, what
    data = source.read_bytes()
    rng = random.Random(name)
    for _ in range(12):
        noise = bytearray(data)
        for _ in range(rng.choice([3, 300, 3000])):
            noise[rng.randrange(100, len(data))] = rng.randrange(256)
        path.write_bytes(noise)
        outcome(path, "noise")
    for cut in (len(data) // 2, 4096, 100, 16):
        path.write_bytes(data[:cut])
        assert outcome(path, f"cut at {cut}") is None
