"""Tiny random engine on the CPU, built as the benchmarks build theirs."""

from pathlib import Path
from typing import Any

import torch

from loadtest.engine.random_engine import random_engine
from lorikeet_engine.engine import Engine, EngineSettings

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SETTINGS = EngineSettings(Path(), Path(), kv_bytes=16 << 20, max_rank=16, max_running=4)


def tiny_engine(folder: Path, *, settings: EngineSettings = SETTINGS, **arguments: Any) -> Engine:
    """Build an engine; takes random_engine's arguments except the config."""
    torch.set_num_threads(1)  # two threads would mostly wait for each other over tensors this small
    return random_engine(folder, config=CONFIG, settings=settings, **arguments)
