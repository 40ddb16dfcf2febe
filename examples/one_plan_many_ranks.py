"""One plan, many ranks: rank 0 plans a step, every rank receives the bytes and uploads the same metadata.

    python examples/one_plan_many_ranks.py --ranks 4

Tensor-parallel ranks see the same batch. Planning on one of them and broadcasting a few KB is enough, and no rank can
disagree with another. The bytes travel between hosts' memories (gloo): nothing waits for a device. The ranks are
processes of this example; in a server they are its workers.
"""

import argparse
import hashlib
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from syncfree.backends.attention import attention_backend
from syncfree.backends.engine.staging import Staging
from syncfree.planner import Batch, Environment, Limits, MetadataPlan, Planner

STEPS = (([1, 1, 1], [9, 70, 31]), ([1, 1, 40], [10, 71, 90]), ([1, 64, 16], [11, 135, 16]))


def broadcast_plan(plan: MetadataPlan | None) -> MetadataPlan:
    """Rank 0 gives its plan, the others `None`; all return the same one. Two messages: how long, and the bytes."""
    data = plan.to_bytes() if plan is not None else b""
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, src=0)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if plan is not None:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, src=0)
    return plan if plan is not None else MetadataPlan.from_bytes(buffer.numpy().tobytes())


def materialise(plan: MetadataPlan, staging: Staging) -> dict[str, torch.Tensor]:
    """All arrays of the plan on this rank's device, by one copy."""
    return staging.upload(plan.host_arrays())


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """What this rank's kernels would read."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def run_rank(rank: int, ranks: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    limits = Limits(num_heads=64 // ranks, num_kv_heads=8 // ranks)
    staging = Staging(torch.device("cpu"), capacity=1 << 16)
    planner = Planner(attention_backend("aiter_fa"), Environment(), limits) if rank == 0 else None
    for query_lens, seq_lens in STEPS:
        mine = planner.plan(Batch.from_lengths(query_lens, seq_lens)) if planner is not None else None
        plan = broadcast_plan(mine)
        prints: list[str | None] = [None] * ranks
        dist.all_gather_object(prints, fingerprint(materialise(plan, staging)))
        if len(set(prints)) != 1:
            raise SystemExit(f"rank {rank}: the ranks hold different metadata: {prints}")
        if rank == 0:
            size = len(plan.to_bytes())
            print(f"{plan.batch_class}: {len(plan.fields)} fields, {size} bytes, the same on {ranks} ranks", flush=True)
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), default=2)
    count = parser.parse_args().ranks
    mp.spawn(run_rank, args=(count, free_port()), nprocs=count)
