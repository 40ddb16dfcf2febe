"""A server that knows nothing of syncfree: run as a program, it steps until it is ended.

    python engine.py [--driver LIBCUDA [--helper]] [--seconds S] [--no-vllm] [--pause S] [--rank R --world N --store F]

Its runner has the names and shapes of vLLM's; torch is the real one. It prints `ready`, then after each line on its
standard input what a test wants to know of it: steps made, the longest gap between two steps, what is left in it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as distributed

sys.path.insert(0, str(Path(__file__).parents[2] / "backends" / "vllm"))
import fake_vllm
from fake_vllm import schedule

sys.path.pop(0)


def schedules():
    """The four classes in turn; request `old` was there before anybody looked."""
    yield schedule({"old": 4}, new=[("old", 12, 0)])
    yield schedule({"old": 4}, cached={"old": 4})
    count = 0
    while True:
        name = f"r{count}"
        count += 1
        yield schedule({name: 8}, new=[(name, 20, 0)])  # first chunk
        yield schedule({name: 8}, cached={name: 8})
        yield schedule({name: 4}, cached={name: 16})
        yield schedule({name: 1}, cached={name: 20})
        yield schedule({name: 1}, cached={name: 21})
        yield schedule({name + "x": 6}, new=[(name + "x", 38, 32)])  # a prefix hit
        yield schedule({name + "y": 6}, new=[(name + "y", 6, 0)], finished=[name, name + "x"])
        yield schedule({name + "y": 1}, cached={name + "y": 6})
        yield schedule({}, finished=[name + "y"])


class Server:
    def __init__(self, driver, pause, helper=False):
        self.driver = ctypes.CDLL(driver) if driver else None
        self.helper = ThreadPoolExecutor(1) if helper else None
        if helper:
            self.driver.fake_sleep(ctypes.c_long(2_000_000))
        self.pause = pause
        self.steps = 0
        self.longest_ms = 0.0
        self.runner = None
        self.alone = False
        self.works = threading.Event()

    def fetch(self):
        if self.driver is not None:  # one synchronizing copy a step, and a launch
            self.driver.cuLaunchKernel(*[ctypes.c_long(1)] * 11)
            self.driver.cuMemcpyDtoHAsync_v2(*map(ctypes.c_long, (0x2000, 0x1000, 64, 7)))
            if self.helper is None:
                self.driver.cuStreamSynchronize(ctypes.c_long(7))
            else:
                self.helper.submit(self.driver.cuStreamSynchronize, ctypes.c_long(7)).result()

    def step(self, output):
        if self.runner is None:
            self.fetch()
            return
        result = self.runner.execute_model(output)
        if result is None:
            self.runner.sample_tokens(None)

    def meet(self):
        """Ranks step together, for as long as all of them live."""
        if distributed.is_initialized() and not self.alone:
            try:
                distributed.barrier()
            except RuntimeError:
                self.alone = True

    def work(self):
        """As a busy worker does: Python, and tensor work that lets the GIL go."""
        tensor = torch.ones(64, 64)
        tensor @ tensor  # with it OpenMP's threads start, which are not to be taken for ours
        self.works.set()
        last = time.perf_counter()
        for output in schedules():
            end = time.perf_counter() + self.pause
            while time.perf_counter() < end:
                tensor @ tensor
            self.meet()
            self.step(output)
            now = time.perf_counter()
            self.longest_ms = max(self.longest_ms, (now - last) * 1e3)
            last = now
            self.steps += 1

    def told(self):
        proc = Path("/proc/self")
        longest, self.longest_ms = self.longest_ms, 0.0
        wrapped = (
            fake_vllm.SOURCES and self.runner is not None and hasattr(type(self.runner).execute_model, "__syncfree__")
        )
        server = sys.modules.get("syncfree.profiler.agent.server")
        current = getattr(server, "current_agent", None)  # it may be just being imported
        agent = current() if current is not None else None
        return {
            "recording": agent is not None and agent.recorder.session is not None,
            "steps": self.steps,
            "longest_ms": longest,
            "maps": len((proc / "maps").read_text().splitlines()),
            "fds": len(list((proc / "fd").iterdir())),
            "threads": sorted(t.name for t in threading.enumerate()),
            "tasks": len(list((proc / "task").iterdir())),
            "rss_kb": int(next(x for x in (proc / "status").read_text().splitlines() if "VmRSS" in x).split()[1]),
            "wrapped": bool(wrapped),
            "finders": [type(f).__name__ for f in sys.meta_path],
            "interval": sys.getswitchinterval(),
            "path": len(sys.path),
            "ours": sorted(n for n in list(sys.modules) if n.split(".")[0] == "syncfree"),
        }


NEEDS = """
import sys, syncfree.profiler.attach.guest, syncfree.backends.vllm
syncfree.backends.vllm.register(attached=True)
print(*(name for name in sys.modules if not name.startswith(("syncfree", "__"))))
"""


def become(uid):
    """Another user, who may not be able to read this Python: so what an agent needs of others is imported before."""
    for name in subprocess.run([sys.executable, "-c", NEEDS], capture_output=True, text=True).stdout.split():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver")
    parser.add_argument("--helper", action="store_true", help="a thread of a pool waits in the driver, for 2 ms")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--store")
    parser.add_argument("--uid", type=int, help="become this user, with whatever is imported by then")
    parser.add_argument("--pause", type=float, default=0.003)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--no-vllm", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    server = Server(options.driver, options.pause, options.helper)
    if options.world > 1:
        where = f"file://{options.store}"
        distributed.init_process_group("gloo", init_method=where, rank=options.rank, world_size=options.world)
    if not options.no_vllm:
        fake_vllm.install()
        runner = sys.modules["vllm.v1.worker.gpu_model_runner"].GPUModelRunner()
        runner.fetch = server.fetch
        server.runner = runner
    if options.uid:
        become(options.uid)
    threading.Thread(target=server.work, daemon=True).start()
    threading.Timer(options.seconds, lambda: os._exit(0)).start()
    server.works.wait()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(server.told()), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
