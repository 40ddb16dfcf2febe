"""The stack walk without the GIL finds what sys._getframe finds."""

import asyncio
import ctypes
import subprocess
import sys
import threading

import pytest
from syncfree.profiler.probe import arena, frames

PATHS = ("", "")


class Walker:
    def __init__(self, harness):
        harness.harness_arena.restype = ctypes.c_void_p
        self.base = harness.harness_arena()
        self.walk_c = harness.probe_stack
        arena.set_python(self.poke, frames.calibrate(), PATHS, "")
        self.names = arena.code_names(self.peek)

    def peek(self, offset, size):
        return ctypes.string_at(self.base + offset, size)

    def poke(self, offset, data):
        ctypes.memmove(self.base + offset, data, len(data))

    def check(self):
        """Walk from here; a ctypes call gives up the GIL, as torch does around a wait."""
        buffer = ctypes.create_string_buffer(8 * arena.MAX_FRAMES)
        found, wanted = self.walk_c(buffer), frames.expected()
        walked = [(*self.names(code), line) for code, line in arena.FRAME.iter_unpack(buffer.raw[: 8 * found])]
        assert walked == wanted[: arena.MAX_FRAMES]
        return walked


@pytest.fixture
def walker(harness):
    return Walker(harness)


def test_plain_calls(walker):
    def inner():
        return walker.check()

    assert inner()[1][1].endswith("inner")


def test_through_c_generators_and_comprehensions(walker):
    def numbers():
        yield walker.check()

    assert sorted([2, 1], key=lambda x: len(list(numbers())) + x) == [1, 2]
    assert [x for x in map(lambda _: walker.check(), [1])]  # noqa: C416, C417 - borders to C are what is tested


def test_deeper_than_what_is_kept(walker):
    def down(n):
        return down(n - 1) if n else walker.check()

    assert len(down(80)) == arena.MAX_FRAMES


def test_constructors(walker):
    class Made:
        def __init__(self, act):
            self.made = act()

    def make(act):
        return Made(act).made

    for _ in range(100):  # from 3.12 on often used constructors are called in another way
        make(int)
    assert make(walker.check)
    assert make(frames.calibrate)["ready"] == 1


def test_coroutines(walker):
    async def work():
        walker.check()
        await asyncio.sleep(0)
        walker.check()

    asyncio.run(work())


def test_other_threads(walker):
    found = []
    thread = threading.Thread(target=lambda: found.append(walker.check()))
    thread.start()
    thread.join()
    assert found


def test_a_thread_without_python_has_no_stack(walker):
    walk = ctypes.cast(walker.walk_c, ctypes.c_void_p).value
    libc = ctypes.CDLL(None)
    buffer, thread, result = ctypes.create_string_buffer(8 * arena.MAX_FRAMES), ctypes.c_ulong(), ctypes.c_void_p(-1)
    assert libc.pthread_create(ctypes.byref(thread), None, ctypes.c_void_p(walk), buffer) == 0
    assert libc.pthread_join(thread, ctypes.byref(result)) == 0
    assert (result.value or 0) & 0xFFFFFFFF == 0


@pytest.mark.parametrize("file", ["/tmp/plain.py", "/tmp/é.py", "/tmp/Ω.py", "/tmp/𝄞é.py"])
def test_any_file_name(walker, file):
    space = {"check": walker.check}
    exec(compile("def f():\n\n    return check()\nfound = f()\n", file, "exec"), space)
    assert (file, "f", 3) in space["found"]


def test_names_are_kept_once(walker):
    before = arena.word(walker.peek, "codes_used")
    for _ in range(3):
        walker.check()
    after = arena.word(walker.peek, "codes_used")
    for _ in range(3):
        walker.check()
    assert arena.word(walker.peek, "codes_used") == after >= before


def test_a_code_object_whose_address_is_used_again_gets_its_own_name(walker):
    seen = set()
    for i in range(300):
        space = {"check": walker.check}
        exec(compile(f"def g{i}():\n    return check()\nname = g{i}()[1][1]\n", "<x>", "exec"), space)
        seen.add(space["name"])
        del space
    assert seen == {f"g{i}" for i in range(300)}


def test_an_interpreter_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    with pytest.raises(frames.LayoutUnknown, match=r"CPython 3\.11"):
        frames.calibrate()


def test_the_calibration_needs_nothing_but_the_standard_library():
    code = f"exec(open({frames.__file__!r}).read()); exec(open({arena.__file__!r}).read()); print(calibrate()['ready'])"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
