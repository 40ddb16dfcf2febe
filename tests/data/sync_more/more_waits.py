"""Waits, streams, events, threads, memory and graphs."""

# One case a line, as a table.

import concurrent.futures
import queue
import threading

import torch
from more_cases import Case, adder, captured, floats, pinned

add = adder("explicit")
add("synchronize_device_arg", lambda d: d, lambda s: torch.cuda.synchronize(s))
add("synchronize_twice", lambda d: d, lambda s: (torch.cuda.synchronize(), torch.cuda.synchronize()))
add("side_stream_synchronize", lambda d: torch.cuda.Stream(), lambda s: s.synchronize())
add("default_stream_synchronize", lambda d: None, lambda s: torch.cuda.default_stream().synchronize())
add("stream_query", lambda d: None, lambda s: torch.cuda.current_stream().query())
add("event_unrecorded_synchronize", lambda d: None, lambda s: torch.cuda.Event().synchronize())
add("event_unrecorded_query", lambda d: None, lambda s: torch.cuda.Event().query())
add("record_event", lambda d: None, lambda s: torch.cuda.current_stream().record_event())
add("record_stream", lambda d: (floats(d), torch.cuda.Stream()), lambda s: s[0].record_stream(s[1]))
add("torch_event", lambda d: None, lambda s: torch.Event().record())
add("accelerator_synchronize", lambda d: None, lambda s: torch.accelerator.synchronize())
add("capturing_query", lambda d: None, lambda s: torch.cuda.is_current_stream_capturing())


class elapsed_time(Case):
    group = "explicit"

    def setup(d):
        return torch.ones(8, device=d), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def run(s):
        s[1].record()
        s[0].add_(1)
        s[2].record()
        s[2].synchronize()  # @sync
        return s[1].elapsed_time(s[2])


class event_wait_on_stream(Case):
    group = "explicit"

    def setup(d):
        return torch.ones(8, device=d), torch.cuda.Stream(), torch.cuda.Event()

    def run(s):
        s[2].record()
        s[2].wait(s[1])
        with torch.cuda.stream(s[1]):
            s[0].add_(1)


class event_synchronized_twice(Case):
    group = "explicit"

    def setup(d):
        return torch.ones(8, device=d), torch.cuda.Event()

    def run(s):
        s[1].record()
        s[1].synchronize()  # @sync
        s[1].synchronize()  # @sync


class item_in_thread(Case):
    group = "threads"

    def setup(d):
        return torch.ones((), device=d)

    def run(s):
        out = []

        def work():
            out.append(s.item())  # @sync

        t = threading.Thread(target=work)
        t.start()
        t.join()
        return out


class item_in_pool(Case):
    group = "threads"

    def setup(d):
        return torch.ones((), device=d), concurrent.futures.ThreadPoolExecutor(1)

    def run(s):
        return s[1].submit(s[0].item).result()  # @sync


class event_in_pool(Case):
    group = "threads"

    def setup(d):
        return torch.ones(64, device=d), torch.cuda.Event(), concurrent.futures.ThreadPoolExecutor(1)

    def run(s):
        y = s[0].to("cpu", non_blocking=True)
        s[1].record()
        future = s[2].submit(s[1].synchronize)
        future.result()  # @sync
        return y


class cpu_in_thread(Case):
    group = "threads"

    def setup(d):
        return torch.ones(64, device=d)

    def run(s):
        t = threading.Thread(target=s.cpu)
        t.start()
        t.join()  # @sync


add = adder("memory")
add("empty_cache_nothing", lambda d: torch.cuda.empty_cache(), lambda s: torch.cuda.empty_cache())
add("memory_allocated", lambda d: None, lambda s: torch.cuda.memory_allocated())
add("mem_get_info", lambda d: None, lambda s: torch.cuda.mem_get_info())
add("memory_stats", lambda d: None, lambda s: torch.cuda.memory_stats())
add("reset_peak", lambda d: None, lambda s: torch.cuda.reset_peak_memory_stats())
add("pin_pinned", lambda d: pinned(8), lambda s: s.pin_memory())
add("is_pinned", lambda d: torch.ones(8), lambda s: s.is_pinned())
add("empty_pinned_cached", lambda d: None, lambda s: torch.empty(64, pin_memory=True))
add("zeros_48mb", lambda d: d, lambda s: torch.zeros(12 << 20, device=s))
add("del_tensor", lambda d: d, lambda s: torch.ones(4096, device=s).sum())
add("resize", lambda d: torch.empty(0, device=d), lambda s: s.resize_(64))


class empty_cache_after_sync(Case):
    group = "memory"

    def setup(d):
        return d

    def run(s):
        x = torch.empty(1 << 26, dtype=torch.uint8, device=s)
        del x
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class empty_cache_two_blocks(Case):
    group = "memory"

    def setup(d):
        torch.cuda.empty_cache()
        return d

    def run(s):
        x = torch.empty(1 << 26, dtype=torch.uint8, device=s), torch.empty(1 << 27, dtype=torch.uint8, device=s)
        del x
        torch.cuda.empty_cache()


add = adder("graph")
add("replay_three", captured, lambda s: [s[0].replay() for _ in range(3)])
add("replay_then_item", captured, lambda s: (s[0].replay(), s[2][0].item())[1])
add("replay_then_argmax_cpu", captured, lambda s: (s[0].replay(), s[2].argmax().cpu())[1])
add("pool_handle", lambda d: None, lambda s: torch.cuda.graph_pool_handle())


class replay_with_pinned_input(Case):
    group = "graph"

    def setup(d):
        return (*captured(d), torch.zeros(1024, pin_memory=True))

    def run(s):
        s[1].copy_(s[3], non_blocking=True)
        s[0].replay()
        return s[2]


class capture_with_pool(Case):
    group = "graph"

    def setup(d):
        return torch.ones(1024, device=d), torch.cuda.graph_pool_handle()

    def run(s):
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, pool=s[1]):  # @sync
            s[0].mul_(1.0)
        return g


add = adder("explicit")
add("stream_context_item", lambda d: (floats(d), torch.cuda.Stream()), lambda s: s[1].__enter__() and (s[0].sum().item(), s[1].__exit__(None, None, None)))
add("stream_none", lambda d: None, lambda s: torch.cuda.stream(None).__enter__())
add("device_context", lambda d: d, lambda s: torch.cuda.device(0).__enter__())
add("set_device", lambda d: d, lambda s: torch.cuda.set_device(0))
add("current_device", lambda d: d, lambda s: (torch.cuda.current_device(), torch.cuda.device_count()))
add("new_stream", lambda d: d, lambda s: torch.cuda.Stream())
add("new_event_record_query", lambda d: d, lambda s: torch.cuda.current_stream().record_event().query())
add("blocking_event_sync", lambda d: torch.cuda.Event(blocking=True), lambda s: (s.record(), s.synchronize()))
add("torch_event_sync", lambda d: torch.Event(), lambda s: (s.record(), s.synchronize()))
add("torch_stream_sync", lambda d: torch.Stream(device=d), lambda s: s.synchronize())
add("accelerator_stream_sync", lambda d: None, lambda s: torch.accelerator.current_stream().synchronize())
add("nvtx", lambda d: None, lambda s: (torch.cuda.nvtx.range_push('a'), torch.cuda.nvtx.range_pop()))
add("wait_event_stream", lambda d: (torch.cuda.Stream(), torch.cuda.Event()), lambda s: (s[1].record(), s[0].wait_event(s[1])))
add("elapsed_unsynced", lambda d: (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)), lambda s: (s[0].record(), s[1].record(), torch.cuda.synchronize(), s[0].elapsed_time(s[1])))
add("ipc_collect", lambda d: None, lambda s: torch.cuda.ipc_collect())
add("device_properties", lambda d: None, lambda s: torch.cuda.get_device_properties(0).total_memory)
add("memory_snapshot_reserved", lambda d: None, lambda s: (torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()))
add("sync_debug_mode", lambda d: None, lambda s: torch.cuda.get_sync_debug_mode())


class queue_worker(Case):
    """An output thread that lives on and takes work from a queue."""

    group = "threads"

    def setup(d):
        work, done = queue.Queue(), queue.Queue()

        def serve():
            while True:
                event = work.get()
                event.synchronize()  # @sync
                done.put(1)

        threading.Thread(target=serve, daemon=True).start()
        return torch.ones(64, device=d), torch.cuda.Event(), work, done

    def run(s):
        y = s[0].to("cpu", non_blocking=True)
        s[1].record()
        s[2].put(s[1])
        s[3].get()
        return y


class two_streams(Case):
    group = "explicit"

    def setup(d):
        return torch.ones(64, device=d), torch.cuda.Stream(), torch.cuda.Stream()

    def run(s):
        x, a, b = s
        with torch.cuda.stream(a):
            y = x + 1
        with torch.cuda.stream(b):
            z = x + 2
        a.synchronize()  # @sync
        b.synchronize()  # @sync
        return y, z


class poll_then_read(Case):
    group = "poll"

    def setup(d):
        return torch.ones(64, device=d), torch.empty(64, pin_memory=True), torch.cuda.Event()

    def run(s):
        s[1].copy_(s[0], non_blocking=True)
        s[2].record()
        while not s[2].query():
            pass
        return s[1].sum()


class poll_stream(Case):
    group = "poll"

    def setup(d):
        return torch.ones(64, device=d)

    def run(s):
        s.add_(1)
        while not torch.cuda.current_stream().query():
            pass


class free_large(Case):
    """Two allocations that fit the cache, given back one at a time."""

    group = "memory"

    def setup(d):
        return d

    def run(s):
        a = torch.empty(1 << 28, dtype=torch.uint8, device=s)
        del a
        b = torch.empty(1 << 27, dtype=torch.uint8, device=s)
        del b
        torch.cuda.empty_cache()


class empty_cache_in_use(Case):
    group = "memory"

    def setup(d):
        torch.cuda.empty_cache()
        return torch.empty(1 << 26, dtype=torch.uint8, device=d)

    def run(s):
        torch.cuda.empty_cache()


class graph_then_event(Case):
    group = "graph"

    def setup(d):
        return (*captured(d), torch.empty(1024, pin_memory=True), torch.cuda.Event())

    def run(s):
        s[0].replay()
        s[3].copy_(s[2], non_blocking=True)
        s[4].record()
        s[4].synchronize()  # @sync
        return s[3].sum()


class capture_warmup_side_stream(Case):
    group = "graph"

    def setup(d):
        return torch.ones(1024, device=d)

    def run(s):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            s.mul_(1.0)
        torch.cuda.current_stream().wait_stream(side)
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):  # @sync
            s.mul_(1.0)
        return g


class capture_begin_end(Case):
    group = "graph"

    def setup(d):
        return torch.ones(1024, device=d), torch.cuda.Stream()

    def run(s):
        g = torch.cuda.CUDAGraph()
        with torch.cuda.stream(s[1]):
            g.capture_begin()
            s[0].mul_(1.0)
            g.capture_end()
        return g
