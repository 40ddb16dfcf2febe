"""python wild_steps.py LIBCUDA WAITS: a helper thread without a frame of the program's waits in the driver, so often,
while the step's thread runs wild. Prints as JSON how many waits there were, how many were put on a line of the step's
thread (`joined`), and what no running program can have shown (`wrong`).
"""

import collections
import ctypes
import functools
import itertools
import json
import random
import sys
import threading
import time
from pathlib import Path

from syncfree.profiler.collectors.probe import ProbeCollector
from syncfree.profiler.sites import blamed

cuda = ctypes.CDLL(sys.argv[1])
WAITS = int(sys.argv[2])
never = threading.Event()


def moment(_=None):
    never.wait(random.choice((1e-7, 1e-5, 3e-4)))


def short_lived():
    thread = threading.Thread(target=sum, args=(range(random.randrange(3000)),))
    thread.start()
    thread.join()


def recursion(depth=None):
    depth = random.randrange(70) if depth is None else depth
    if depth:
        recursion(depth - 1)
    else:
        random.choice((moment, short_lived))()


def numbers():
    for k in range(3):
        moment()
        yield k


def generators():
    list(itertools.chain(numbers(), (k for k in numbers())))


def made():
    """A function that is made, run and dropped; its file, its name and its lines go together."""
    k = random.randrange(5000)
    source = "\n" * k + f"def made_{k}():\n    wait(1e-5)\n    return [wait(t) for t in (1e-6, 2e-5)]\n"
    space = {"wait": never.wait}
    exec(compile(source, made_file(k), "exec"), space)
    space[f"made_{k}"]()


def made_file(k):
    return f"/made/{k}/{'x' * (k % 300)}.py"


class Dropped:
    def __del__(self):
        moment()


def cycles():
    one = Dropped()
    one.itself = one


def through_c():
    sorted(range(3), key=lambda _: moment() or 0)
    functools.reduce(lambda a, b: moment() or b, range(3))


KINDS = (moment, short_lived, recursion, generators, made, cycles, through_c)


def wild(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        random.choice(KINDS)()


def note_lines(code):
    KNOWN[code.co_qualname] |= {line for _, _, line in code.co_lines() if line}
    for constant in code.co_consts:
        if hasattr(constant, "co_lines"):
            note_lines(constant)


KNOWN = collections.defaultdict(set)  # lines by function
note_lines(compile(Path(__file__).read_text(), __file__, "exec"))


def possible(frame):
    if frame.file == __file__:
        return frame.line in KNOWN[frame.function]
    if frame.function.startswith("made_"):
        k = int(frame.function.partition(".")[0][5:])
        return frame.file == made_file(k) and frame.line in (k + 2, k + 3)
    return True


def main():
    helper = threading.Thread(
        target=collections.deque, args=(map(cuda.cuEventSynchronize, range(WAITS)), 0), daemon=True
    )
    told, wrong = collections.Counter(), []
    probe = ProbeCollector()
    probe.start()

    def take():
        for call in probe.drain():
            if call.api == "cuEventSynchronize":
                told[blamed(call.stack).file == threading.__file__] += 1
                wrong.extend(str(frame) for frame in call.stack if not possible(frame))

    def step():
        probe.mark(0)
        wild(0.05)
        take()

    def short_steps():
        probe.mark(0)
        wild(0.05)

    step()
    helper.start()
    while helper.is_alive():
        for _ in range(5):
            step()
        other = threading.Thread(target=short_steps)  # from its end on the step's thread is one that is no more
        other.start()
        other.join()
        time.sleep(0.01)
        take()
    waits = probe.mark(0).event
    probe.stop()
    take()
    print(json.dumps({"waits": waits, "joined": told[False], "own": told[True], "wrong": wrong[:10]}))


main()
