"""An engine whose model sleeps: the real work of the host's side, and none of a GPU's."""

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from engine.benchmarks.random_model import write_config
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.batch import Batch
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.models import ModelConfig
from lorikeet_engine.request import Output

VOCAB = 262  # the demo's tokenizer's
_CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}


class SleepingModel:
    """Stands in for Model: a forward pass takes step_s without the interpreter lock."""

    def __init__(self, config: ModelConfig, step_s: float) -> None:
        self.config = config
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self._step_s = step_s

    def forward(self, batch: Batch, *_: Any) -> torch.Tensor:
        """Hidden states [tokens, 1]: each token's id."""
        time.sleep(self._step_s)
        return batch.token_ids[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, VOCAB] float32 whose largest is the next id's after the token's own."""
        logits = torch.zeros(len(hidden), VOCAB)
        return logits.scatter_(1, (hidden + 1) % VOCAB, 1.0)


class TimedEngine(Engine):
    """Notes when the step that gave each token ended; closed, it writes that to `times`."""

    def __init__(self, settings: EngineSettings, times: Path, step_s: float) -> None:
        def load(folder: Path, *_: Any) -> Any:
            return SleepingModel(ModelConfig.from_folder(folder), step_s)

        super().__init__(settings, _NoAdapters(), load)
        self._times = times
        self._ends_s: dict[str, list[float]] = defaultdict(list)

    def step(self) -> list[Output]:
        """Engine.step, timed."""
        outputs = super().step()
        now_s = time.monotonic()
        for output in outputs:
            self._ends_s[output.request_id].append(now_s)
        return outputs

    def close(self) -> list[Output]:
        """Engine.close."""
        self._times.write_text(json.dumps(self._ends_s))
        return super().close()


def sleeping_engine(folder: Path, times: Path, step_s: float) -> TimedEngine:
    """A TimedEngine for 256 sequences of up to 1,024 tokens; writes its files to `folder`."""
    model = folder / "model"
    settings = EngineSettings(
        model=model if model.exists() else write_config(model, _CONFIG),
        cache_dir=folder / "cache",
        adapter_gpu_bytes=1 << 20,
        adapter_host_bytes=1 << 20,
    )
    return TimedEngine(settings, times, step_s)


class _NoAdapters:
    def fetch(self, ref: AdapterRef, _path: Path) -> None:
        raise LookupError(f"{ref}: this engine has no adapters")
