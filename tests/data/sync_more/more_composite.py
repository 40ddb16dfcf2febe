"""Several of them together, as engines write them."""

# One case a line, as a table.

import numpy as np
import torch
import torch.nn.functional as F
from more_cases import Case


class builder_decode(Case):
    group = "composite"

    def setup(d):
        return torch.randint(1, 400, (32,), device=d), torch.randint(0, 9, (32, 8), device=d, dtype=torch.int32)

    def run(s):
        seq_lens, table = s
        max_seq_len = seq_lens.max().item()  # @sync
        blocks = (seq_lens + 15) // 16
        indptr = torch.zeros(33, dtype=torch.int32, device=seq_lens.device)
        indptr[1:] = blocks.cumsum(0)
        valid = torch.arange(8, device=seq_lens.device)[None] < blocks[:, None]
        indices = table[valid]  # @sync
        return max_seq_len, indptr, indices


class output_fetch(Case):
    group = "composite"

    def setup(d):
        return torch.rand(8, 1000, device=d), torch.empty(8, dtype=torch.int64, pin_memory=True), torch.cuda.Event()

    def run(s):
        logits, host, event = s
        tokens = logits.argmax(-1)
        host.copy_(tokens, non_blocking=True)
        event.record()
        event.synchronize()  # @sync
        return host.tolist()


class spec_decode_accept(Case):
    group = "composite"

    def setup(d):
        return torch.randint(0, 9, (8, 4), device=d), torch.randint(0, 9, (8, 4), device=d)

    def run(s):
        draft, target = s
        accepted = (draft == target).int().cumprod(dim=1).sum(dim=1)
        lengths = accepted.tolist()  # @sync
        return [target[i, : n + 1] for i, n in enumerate(lengths)]


class moe_dispatch(Case):
    group = "composite"

    def setup(d):
        return torch.rand(32, 8, device=d), torch.rand(32, 16, device=d)

    def run(s):
        scores, x = s
        weights, experts = scores.softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(8):
            rows, slots = torch.where(experts == e)  # @sync
            out.index_add_(0, rows, x[rows] * weights[rows, slots, None])
        return out


class repeated_item_in_layers(Case):
    group = "composite"

    def setup(d):
        return torch.rand(4, 8, 8, device=d), torch.tensor(5, device=d)

    def run(s):
        x, n = s
        for layer in x:
            layer[: int(n)] *= 2  # @sync
        return x


class chunked_context(Case):
    group = "composite"

    def setup(d):
        return torch.randint(1, 400, (8,), device=d), torch.randint(1, 400, (8,))

    def run(s):
        lens, host_lens = s
        chunks = int((host_lens.max() + 127) // 128)
        starts = torch.arange(chunks, dtype=torch.int32).unsqueeze(1).expand(-1, 8) * 128
        ends = torch.min(host_lens.unsqueeze(0), starts + 128)
        chunk_lens = (ends - starts).clamp(min=0)
        starts = starts.to(lens.device, non_blocking=True)
        cu = F.pad(chunk_lens.cumsum(1, dtype=torch.int32), (1, 0)).pin_memory().to(lens.device, non_blocking=True)
        return starts, cu, chunk_lens.sum(1).tolist()


class grammar_mask(Case):
    group = "composite"

    def setup(d):
        return torch.rand(4, 64, device=d), np.ones((4, 2), dtype=np.int32)

    def run(s):
        logits, bits = s
        mask = torch.from_numpy(bits).to(logits.device, non_blocking=True)
        allowed = (
            mask[:, torch.arange(64, device=logits.device) // 32] >> (torch.arange(64, device=logits.device) % 32)
        ) & 1
        return logits.masked_fill_(allowed == 0, float("-inf"))


class penalties(Case):
    group = "composite"

    def setup(d):
        return torch.rand(4, 64, device=d), [[1, 2], [3], [4, 5, 6], []]

    def run(s):
        logits, history = s
        width = max(len(h) for h in history)
        padded = torch.full((4, width), 63, dtype=torch.int64, pin_memory=True)
        for row, tokens in enumerate(history):
            padded[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        tokens = padded.to(logits.device, non_blocking=True)
        counts = torch.zeros(4, 65, device=logits.device).scatter_add_(
            1, tokens, torch.ones_like(tokens, dtype=torch.float32)
        )
        return logits - counts[:, :64]
