"""The planner in a metadata builder of one's own, in four lines: batch, plan, one upload, plain integers.

Run it: `python examples/embed_in_a_builder.py` builds three steps on the simulated device and shows that none waits.
"""

from dataclasses import dataclass

import torch
from syncfree.backends.attention import attention_backend
from syncfree.backends.engine.staging import Staging
from syncfree.planner import Batch, Environment, Limits, Planner
from syncfree.profiler import assert_sync_free, simulated_device


@dataclass
class Metadata:
    tensors: dict[str, torch.Tensor]  # what kernels read on the device, by the plan's names
    values: dict[str, object]  # what kernels are called with: stays on the host
    graph_eligible: bool


class MetadataBuilder:
    def __init__(self, device: torch.device) -> None:
        self.planner = Planner(attention_backend("aiter_fa"), Environment(), Limits(num_heads=16, num_kv_heads=8))
        self.staging = Staging(device, capacity=1 << 16)

    def build(self, query_lens: list[int], seq_lens: list[int]) -> Metadata:
        plan = self.planner.plan(Batch.from_lengths(query_lens, seq_lens))
        tensors = self.staging.upload(plan.host_arrays())
        values = {n: f.value for n, f in plan.fields.items() if f.source == "host" and n not in tensors}
        return Metadata(tensors, values, plan.graph_eligible)


if __name__ == "__main__":
    with simulated_device() as device, assert_sync_free():
        builder = MetadataBuilder(device)
        for step in (([1, 1], [9, 70]), ([1, 40], [10, 90]), ([1, 1, 16], [11, 91, 16])):
            metadata = builder.build(*step)
            print(metadata.graph_eligible, sorted(metadata.tensors), metadata.values)
