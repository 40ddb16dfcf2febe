"""Writes the small traces of this folder: `python make.py`. Shapes and habits are those of the real tools.

What each must be read as stands in tests/profiler/readers/test_own_traces.py, worked out by hand from these lines.
"""

import gzip
import json
import sqlite3
from pathlib import Path

HERE = Path(__file__).parent


class Kineto:
    """A Chrome trace as Kineto writes it; times in microseconds."""

    def __init__(self, pid=100):
        self.pid = pid
        self.events = []
        self.correlation = 1000

    def host(self, cat, name, ts, dur, tid=None, **args):
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": self.pid,
                "tid": tid or self.pid,
                "ts": ts,
                "dur": dur,
                "args": args,
            }
        )

    def call(self, name, ts, dur=2.0, tid=None, cat="cuda_runtime", **args):
        self.correlation += 1
        self.host(cat, name, ts, dur, tid, correlation=self.correlation, **args)
        return self.correlation

    def device(self, cat, name, ts, dur, correlation, **args):
        args = {"device": 0, "stream": 7, "correlation": correlation} | args
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args}
        )

    def document(self, **fields):
        return {"schemaVersion": 1, **fields, "traceEvents": self.events, "displayTimeUnit": "ms"}


def cuda_decode():
    """Three decode steps of a vLLM-like engine: step 1 reads a value back with .item(), the others do not wait."""
    t = Kineto()
    for i in range(3):
        start = 1_000_000.125 + i * 10_000
        t.host("user_annotation", "execute_context_0(0)_generation_4(4)", start, 6_000.5)
        t.host("python_function", "vllm/v1/worker/gpu_model_runner.py(100): execute_model", start + 1, 5_990)
        t.host("cpu_op", "aten::add", start + 10, 20)
        launch = t.call("cudaLaunchKernel", start + 12, 5.25)
        t.device("kernel", "void add<float>(float*)", start + 40, 100, launch)
        graph = t.call("cudaGraphLaunch", start + 100, 30)
        for n in range(5):
            t.device("kernel", "decode_kernel" if n else "norm_kernel", start + 200 + 100 * n, 90, graph)
        if i == 1:
            t.host("python_function", "vllm/v1/attention/backends/bad.py(7): build", start + 900, 400)
            t.host("python_function", "torch/_tensor.py(90): item", start + 901, 390)
            t.host("cpu_op", "aten::item", start + 905, 300)
            copy = t.call("cudaMemcpyAsync", start + 910, 8)
            t.device("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", start + 915, 2, copy, bytes=4)
            t.call("cudaStreamSynchronize", start + 920, 250)
            after = t.call("cudaLaunchKernel", start + 1_400, 5)
            t.device("kernel", "void add<float>(float*)", start + 1_420, 50, after)
        for n in range(4):
            t.call("cudaEventQuery", start + 2_000 + n, 0.5)
    t.call("cudaDeviceSynchronize", 1_100_000, 12)
    properties = [{"id": 0, "name": "NVIDIA Test Device"}]
    return t.document(
        deviceProperties=properties, cuda_runtime_version=12040, distributedInfo={"rank": 3, "world_size": 4}
    )


def rocm_mixed():
    """One mixed step; ROCm's device records call copies with pinned memory DtoD, and a capture lies before the step."""
    t = Kineto(pid=500)
    t.host("user_annotation", "capture_4_FULL", 100.0, 500.0)
    t.call("hipStreamBeginCapture", 110)
    for n in range(3):
        t.call("hipLaunchKernel", 120 + 10 * n)
    t.call("hipMemcpyAsync", 160, kind="3", bytes="64")
    t.call("hipStreamEndCapture", 170)
    name = "execute_260_context_2(sq250sk400sqsq31250sqsk50000)_generation_10(sq10sk3000sqsq10sqsk3000)"
    t.host("user_annotation", name, 1000.0, 2000.0)
    t.host("user_annotation", "step[MIXED bs=12]", 1100.0, 1500.0)
    for n, kind in enumerate(("1", "1", "2")):
        copy = t.call("hipMemcpyAsync", 1200 + 20 * n, kind=kind, bytes=str(100 * (n + 1)))
        t.device(
            "gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1210 + 20 * n, 3, copy, kind="DtoD", bytes=100 * (n + 1)
        )
    t.call("hipEventSynchronize", 1300, 40)
    with_stream = t.call("hipMemcpyWithStream", 1400, 800, kind="2", bytes="8")
    t.device("gpu_memcpy", "Memcpy DtoH (Device -> Host)", 2190, 2, with_stream, kind="DtoH", bytes=8)
    launch = t.call("hipModuleLaunchKernel", 2300)
    t.device("kernel", "Cijk_Ailk", 2310, 40, launch)
    worker = t.call("hipLaunchKernel", 2400, tid=501)
    t.device("kernel", "allreduce", 3500, 40, worker)
    t.device("kernel", "orphan", 50, 20, 7)
    return t.document(deviceProperties=[{"id": 0, "name": ""}], hip_runtime_version=70253211, roctracer_version=4.1)


CSV_API = '"Domain","Function","Process_Id","Thread_Id","Correlation_Id","Start_Timestamp","End_Timestamp"\n'
CSV_KERNEL = (
    '"Kind","Agent_Id","Queue_Id","Stream_Id","Thread_Id","Dispatch_Id","Kernel_Id","Kernel_Name","Correlation_Id",'
    '"Start_Timestamp","End_Timestamp"\n'
)
CSV_COPY = (
    '"Kind","Direction","Source_Agent_Id","Destination_Agent_Id","Correlation_Id","Start_Timestamp","End_Timestamp"\n'
)


def rocprofv3():
    """Two steps marked with roctx; the marker named after a HIP function is no call."""
    marks = [("decode 0", 1000, 9000), ("hipMemcpy", 1500, 1600), ("decode 1", 10000, 19000)]
    api = [
        ("hipLaunchKernel", 1100, 1200, 1),
        ("hipGraphLaunch", 2000, 2400, 2),
        ("hipMemcpyAsync", 3000, 3100, 3),
        ("hipStreamSynchronize", 3100, 8000, 4),
        ("hipLaunchKernel", 10100, 10200, 5),
        ("hipMemcpy", 11000, 15000, 6),
        ("hipFree", 30000, 30100, 7),
    ]
    kernels = [
        ("gemm(float*, int)", 1, 1300, 1400),
        *(("node", 2, 2500 + 10 * n, 2508 + 10 * n) for n in range(6)),
        ("gemm(float*, int)", 5, 10300, 10400),
    ]
    copies = [("DEVICE_TO_HOST", 3, 3200, 3300), ("HOST_TO_DEVICE", 6, 11100, 11200)]
    rows = "".join(f'"MARKER_CORE_RANGE_API","{name}",9,9,{i},{a},{b}\n' for i, (name, a, b) in enumerate(marks))
    (HERE / "run_marker_api_trace.csv").write_text(CSV_API + rows)
    rows = "".join(f'"HIP_RUNTIME_API_EXT","{name}","9","9","{c}","{a}","{b}"\n' for name, a, b, c in api)
    rows += '"HIP_COMPILER_API_EXT","__hipPushCallConfiguration","9","9","8","1090","1095"\n'
    (HERE / "run_hip_api_trace.csv").write_text(CSV_API + rows)
    rows = "".join(
        f'"KERNEL_DISPATCH","Agent 1","1","1","9","{i}","3","{name}","{c}","{a}","{b}"\n'
        for i, (name, c, a, b) in enumerate(kernels)
    )
    (HERE / "run_kernel_trace.csv").write_text(CSV_KERNEL + rows)
    rows = "".join(f'"MEMORY_COPY","MEMORY_COPY_{d}",1,0,{c},{a},{b}\n' for d, c, a, b in copies)
    (HERE / "run_memory_copy_trace.csv").write_text(CSV_COPY + rows)


def rocprofv3_json():
    """The same run as one document."""
    kinds = [
        {"kind": "NONE", "operations": []},
        {
            "kind": "HIP_RUNTIME_API_EXT",
            "operations": [
                "hipFree",
                "hipLaunchKernel",
                "hipGraphLaunch",
                "hipMemcpyAsync",
                "hipStreamSynchronize",
                "hipMemcpy",
            ],
        },
        {
            "kind": "MEMORY_COPY",
            "operations": ["MEMORY_COPY_NONE", "MEMORY_COPY_HOST_TO_DEVICE", "MEMORY_COPY_DEVICE_TO_HOST"],
        },
        {"kind": "MARKER_CORE_RANGE_API", "operations": ["roctxMarkA", "roctxThreadRangeA"]},
        {
            "kind": "KERNEL_DISPATCH",
            "operations": ["KERNEL_DISPATCH_NONE", "KERNEL_DISPATCH_ENQUEUE", "KERNEL_DISPATCH_COMPLETE"],
        },
    ]

    def record(kind, operation, start, end, correlation, **more):
        times = {"start_timestamp": start, "end_timestamp": end}
        return {
            "size": 64,
            "kind": kind,
            "operation": operation,
            "thread_id": 9,
            "correlation_id": {"internal": correlation, "external": 0},
            **times,
            **more,
        }

    def dispatch(kernel, correlation, start, end):
        info = {"size": 72, "agent_id": {"handle": 5}, "queue_id": {"handle": 1}, "kernel_id": kernel, "dispatch_id": 1}
        return record(4, 2, start, end, correlation, dispatch_info=info)

    api = [
        (1, 1100, 1200, 1),
        (2, 2000, 2400, 2),
        (3, 3000, 3100, 3),
        (4, 3100, 8000, 4),
        (1, 10100, 10200, 5),
        (5, 11000, 15000, 6),
        (0, 30000, 30100, 7),
    ]
    records = {
        "kernel_dispatch": [
            dispatch(1, 1, 1300, 1400),
            *(dispatch(2, 2, 2500 + 10 * n, 2508 + 10 * n) for n in range(6)),
            dispatch(1, 5, 10300, 10400),
        ],
        "hip_api": [record(1, operation, start, end, c) for operation, start, end, c in api],
        "memory_copy": [record(2, 2, 3200, 3300, 3, bytes=16), record(2, 1, 11100, 11200, 6, bytes=32)],
        "marker_api": [record(3, 1, 1000, 9000, 101), record(3, 1, 10000, 19000, 102)],
    }
    process = {
        "metadata": {"pid": 9},
        "agents": [
            {"type": 1, "name": "cpu", "product_name": "CPU"},
            {"type": 2, "name": "gfx942", "product_name": "AMD Test Device"},
        ],
        "strings": {
            "buffer_records": kinds,
            "marker_api": [{"key": 101, "value": "decode 0"}, {"key": 102, "value": "decode 1"}],
        },
        "kernel_symbols": [
            {"kernel_id": 1, "formatted_kernel_name": "gemm(float*, int)"},
            {"kernel_id": 2, "formatted_kernel_name": "node"},
        ],
        "buffer_records": records,
    }
    (HERE / "run_results.json").write_text(json.dumps({"rocprofiler-sdk-tool": [process]}))


def nsys():
    """Two processes with the same correlation ids; ids join only within a process."""
    path = HERE / "two_processes.sqlite"
    path.unlink(missing_ok=True)
    db = sqlite3.connect(path)
    db.executescript(
        """
        CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER,
            correlationId INTEGER, nameId INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
            correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, correlationId INTEGER, globalPid INTEGER,
            bytes INTEGER, copyKind INTEGER, srcKind INTEGER, dstKind INTEGER);
        CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER,
            textId INTEGER);
        CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT);
        """
    )
    names = [
        "cudaLaunchKernel_v7000",
        "cudaMemcpyAsync_v3020",
        "cudaStreamSynchronize_v3020",
        "cudaGraphLaunch_v10000",
        "kern<float>",
        "execute_context_0(0)_generation_8(8)",
    ]
    db.executemany("INSERT INTO StringIds VALUES (?, ?)", list(enumerate(names)))
    for process, syncs in ((11, 0), (12, 1)):
        pid = process << 24
        tid = pid | 77
        base = 1_000_000 * process
        calls = [
            (0, 100, 105, 1),
            (3, 200, 230, 2),
            (1, 300, 305, 3),
            *([(2, 306, 900, 4)] if syncs else []),
            (0, 1000, 1005, 5),
        ]
        db.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, ?)",
            [(base + a, base + b, tid, c, name) for name, a, b, c in calls],
        )
        kernels = [(150, 180, 1), *((250 + 10 * n, 258 + 10 * n, 2) for n in range(4)), (1100, 1150, 5)]
        db.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 7, ?, ?, 4, 4)",
            [(base + a, base + b, c, pid) for a, b, c in kernels],
        )
        db.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, 3, ?, 64, 2, 2, 1)", (base + 310, base + 312, pid)
        )
        db.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, NULL, ?, 5)", (base, base + 2000, tid))
    db.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA Test Device')")
    db.commit()
    db.execute("VACUUM")
    db.close()


def main():
    (HERE / "cuda_decode_rank3.json").write_text(json.dumps(cuda_decode(), indent=1))
    packed = gzip.compress(json.dumps(rocm_mixed()).encode(), mtime=0)
    (HERE / "rocm_mixed.json.gz").write_bytes(packed)
    rocprofv3()
    rocprofv3_json()
    nsys()


if __name__ == "__main__":
    main()
