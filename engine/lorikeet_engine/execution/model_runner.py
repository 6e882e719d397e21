"""One forward pass: a batch in, the wanted logits out. Sampling is a step of its own."""

import torch

from lorikeet_engine.execution.cuda_graphs import CudaGraphs
from lorikeet_engine.kernels.attention import AttentionBackend
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.models import LlamaModel
from lorikeet_engine.models.batch import Batch


class ModelRunner:
    """Runs batches through a model; holds the KV pages and the adapters' weights it works on."""

    def __init__(
        self,
        model: LlamaModel,
        attention: AttentionBackend,
        weights: LoraWeights | None,
        kv: torch.Tensor,
        graphs: CudaGraphs | None = None,
    ) -> None:
        """Take a loaded model and what it works on.

        weights: None for an engine that serves the base model alone.
        kv [layers, 2, pages, page_size, kv_heads, head_dim], contiguous, in the model's dtype.
        graphs: of the same model, weights and kv, for the steps that fit them.
        """
        self.model = model
        self._attention = attention
        self._weights = weights
        self._kv = kv
        self._graphs = graphs

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens for which passes are captured, from small to large."""
        return () if self._graphs is None else self._graphs.sizes

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [rows, vocab] of batch.logit_rows, in the model's dtype; keys and values are kept.

        The result belongs to the caller, who may change it in place.
        """
        if self._graphs is not None and self._graphs.fit(batch):
            return self.model.logits(self._graphs.forward(batch))
        return self.without_graph(batch)

    @torch.inference_mode()
    def without_graph(self, batch: Batch) -> torch.Tensor:
        """The same, each kernel launched by itself."""
        self._attention.plan(batch)
        hidden = self.model.forward(batch, self._kv, self._weights, self._attention)
        return self.model.logits(hidden[batch.logit_rows])
