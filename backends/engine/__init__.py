"""A small serving engine to profile: continuous batching, chunked prefill, prefix cache, a tiny transformer.

Read in this order: request, blocks, scheduler, metadata, backend, builders, attention, model, engine, demo.
"""

from .engine import Engine, EngineConfig
from .model import ModelConfig
from .request import Request

__all__ = ["Engine", "EngineConfig", "ModelConfig", "Request"]
