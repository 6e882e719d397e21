"""A tiny random engine on the CPU, as the benchmarks build theirs."""

from functools import partial
from pathlib import Path

from engine.benchmarks.random_engine import random_engine
from lorikeet_engine.engine import EngineSettings

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
SETTINGS = EngineSettings(Path(), Path(), max_rank=16, max_running=4)

tiny_engine = partial(random_engine, config=CONFIG, settings=SETTINGS)
