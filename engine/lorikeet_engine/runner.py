"""One forward pass: a batch in, the wanted logits out. Sampling is a step of its own."""

import torch

from lorikeet_engine.batch import Batch
from lorikeet_engine.kernels.attention import AttentionBackend
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.models import Model


class Runner:
    """Runs batches through a model; holds the KV pages and the adapters' weights it works on."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        weights: LoraWeights | None,
        kv: torch.Tensor,
    ) -> None:
        """Take a loaded model and what it works on.

        weights: None for an engine that serves the base model alone.
        kv [layers, 2, pages, page_size, kv_heads, head_dim], contiguous, in the model's dtype.
        """
        self.model = model
        self._attention = attention
        self._weights = weights
        self._kv = kv

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [rows, vocab] float32 of batch.logit_rows; the batch's keys and values are kept.

        The result belongs to the caller, who may change it in place.
        """
        self._attention.plan(batch)
        hidden = self.model.forward(batch, self._kv, self._weights, self._attention)
        return self.model.logits(hidden[batch.logit_rows])
