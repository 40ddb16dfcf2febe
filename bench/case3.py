"""Case 3 of `cases.py`: persistent MLA decode. What builders fill, and the kernels' time against the route's choice."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import field_builders as fields
import numpy as np
import torch
from serving import Row, Sizes

ROOT = Path(__file__).resolve().parents[1]
WORK = ("work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
ROWS = (8, 64)  # from 32 rows on aiter leaves the persistent kernel on some cards: nothing to fill
LAYERS = 32
RECORDED = ROOT / "bench" / "results" / "2026-11-29-h200" / "mla_times.json"


def builders(run: Any, sizes: Sizes) -> dict[str, Any]:
    """Decode builds of every variant: waits, launches, host time, and which of the six buffers a kernel is handed."""
    import cases

    told: dict[str, Any] = {}
    setting = run.setting(sizes, 0)
    for name, what in fields.CASES["case3"].items():
        builder = fields.make("case3", name, setting)
        told[name] = {"what": what}
        for rows in ROWS:
            common = _decode_step(run, sizes, [sizes.prompt] * rows)
            for _ in range(3):
                made = builder.build(0, common)
            times = []
            for _ in range(3 if run.smoke else 50):
                torch.cuda.synchronize()
                began = time.perf_counter()
                made = builder.build(0, common)
                times.append((time.perf_counter() - began) * 1e6)

            def several(around: Any, builder: Any = builder, common: Any = common) -> None:
                for _ in range(3):
                    with around("decode"):
                        builder.build(0, common)

            told[name][f"{rows} rows"] = {
                "filled": [buffer for buffer in WORK if getattr(made, buffer, None) is not None],
                "build_us": round(statistics.median(times), 1),
                **cases.counted(run, several)["by_kind"]["decode"],
            }
            if name == "ours":
                _, plan = builder._attached.plan(builder, common)
                told[name][f"{rows} rows"]["route"] = plan.routes["decode"]
        cases.fell_back(run, "case3", builder)
    return told


def _decode_step(run: Any, sizes: Sizes, lens: list[int]) -> Any:
    """The metadata of one decode step, pages of one token, as 0.18.1 wants them."""
    rows = [Row(slot, 1, length - 1, True, True) for slot, length in enumerate(lens)]
    starts = np.arange(len(lens) + 1, dtype=np.int32)
    table = torch.arange(len(lens) * sizes.room, dtype=torch.int32).view(len(lens), sizes.room)
    places = torch.tensor([slot * sizes.room + length - 1 for slot, length in enumerate(lens)])
    on_device = (torch.from_numpy(starts), torch.tensor(lens, dtype=torch.int32), table, places)
    starts_d, lens_d, table_d, places_d = (tensor.to(run.device) for tensor in on_device)
    return fields.common_metadata(rows, starts, starts_d, lens_d, table_d, places_d)


def kernels(run: Any) -> dict[str, Any]:
    """A step of 32 layers by the persistent kernel, by fixed splits, and by the route's choice, over all shapes.

    On the simulated device nothing can be timed: recorded timings are replayed, and said to be.
    """
    import fit_times

    if run.smoke:
        recorded = json.loads(RECORDED.read_text())
        return compare(recorded["timing"]["rows"], 132) | {"replayed": str(RECORDED.relative_to(ROOT))}
    import mla_h200

    timing = mla_h200.time_shapes(_timed(mla_h200))
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    told = compare(timing["rows"], processors)
    run.failures += [f"case 3: {name}: {kernel} is {regret:.1%} slower" for name, kernel, regret in told["misses"]]
    # A file that the route's coefficients can be fitted to anew: bench/gpu/fit_times.py
    data = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": mla_h200.triton.__version__}
    run.keep("timing.json", data | {"num_cu": processors, "timing": timing})
    assert fit_times.TOLERANCE == 0.03
    return told


def _timed(module: Any) -> Any:
    # Of its own: what the serving loops took must not leave this one without.
    return module.Run(512, 64, False, time.monotonic() + 90)


def compare(rows: list[dict[str, Any]], num_cu: int) -> dict[str, Any]:
    """Milliseconds of a step of 32 layers; scheduling once a step is the persistent kernel's."""
    import fit_times
    from syncfree.backends import mla_decode_times as model

    found, misses = [], []
    times = model.measured()
    for row in rows:
        choice = model.choose(fit_times.shape_of(row, num_cu))
        us = fit_times.timings(row)
        splits = min((known for known in us if known), key=lambda known: us[known])
        persistent, fixed, chosen = us[0], us[splits], us[choice.splits]
        regret = chosen / min(persistent, fixed) - 1
        found.append(
            {name: row[name] for name in ("lengths", "batch", "heads", "query_len")}
            | {
                "persistent_ms": round((persistent * LAYERS + row["scheduler_us"]) / 1e3, 4),
                "fixed_ms": round(fixed * LAYERS / 1e3, 4),
                "fixed_splits": splits,
                "route": choice.kernel,
                "route_ms": round((chosen * LAYERS + row["scheduler_us"] * choice.persistent) / 1e3, 4),
                "route_off_by": round(regret, 4),
                "block_timed": model.block_rows(row["heads"] * row["query_len"]) in times.blocks,
            }
        )
        if regret > fit_times.TOLERANCE and found[-1]["block_timed"]:
            misses.append((fit_times.name_of(row), choice.kernel, regret))
    return {"layers": LAYERS, "kernels": found, "misses": misses, "route_data": times.device}
