"""What makes the same tokens mean something: weights with which attention matters, and a planner that is wrong."""

from __future__ import annotations


def weights_that_matter() -> None:
    """vLLM's dummy weights are so small that attention adds nothing: every token would follow from the one before."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load_weights(self, model, model_config) -> None:
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.data.fill_(1)
            else:
                values = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
                parameter.data.copy_(values)

    DummyModelLoader.load_weights = load_weights


def wrong_lengths() -> None:
    """Every planned decode misses the newest token of its sequence: with `on` the tokens have to change."""
    import torch
    from syncfree.backends.vllm.planned import cpu, triton, triton_mla

    for adapter in (cpu.CpuAttention, triton.TritonAttention, triton_mla.TritonLatentAttention):
        right = adapter.materialise

        def wrong(self, builder, plan, *about, right=right):
            metadata = right(self, builder, plan, *about)
            made = metadata.decode if hasattr(metadata, "decode") else metadata
            if made is not None:
                made.seq_lens = torch.where(made.seq_lens > 1, made.seq_lens - 1, made.seq_lens)
            return metadata

        adapter.materialise = wrong
