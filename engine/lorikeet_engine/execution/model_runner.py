"""Runs forward passes: a batch in, the wanted logits out. Sampling is done elsewhere."""

import torch

from lorikeet_engine.errors import DeviceLost
from lorikeet_engine.execution.cuda_graphs import CudaGraphs
from lorikeet_engine.kernels.attention.protocol import AttentionBackend
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.models.batch import Batch
from lorikeet_engine.models.llama import LlamaModel


class ModelRunner:
    """Runs batches through a model; holds the KV pages and the adapters' weights.

    On CUDA a step copies its batch to static tensors and replays a graph (cuda_graphs.py): the
    products, attention and LoRA kernels in it are those that LlamaModel.forward (models/llama.py)
    launched when it was captured, at start. Nothing of models/ and kernels/ is called by then but
    `logits`, and by a step that is too large for the graphs.
    """

    def __init__(
        self,
        model: LlamaModel,
        attention: AttentionBackend,
        weights: LoraWeights | None,
        kv: torch.Tensor,
        graphs: CudaGraphs | None = None,
    ) -> None:
        """Take a loaded model and the tensors that it works on.

        weights: None for an engine that serves the base model alone.
        kv [layers, 2, pages, page_size, kv_heads, head_dim], contiguous, in the model's dtype.
        graphs: captured with this model, weights and kv; used for the batches that fit them.
        """
        self.model = model
        self._attention = attention
        self._weights = weights
        self._kv = kv
        self._graphs = graphs

    @property
    def prompt_sizes(self) -> tuple[int, ...]:
        """How many tokens steps with prompts are padded to, ascending; empty without graphs.

        Those with a few tokens near a prompt's beginning may be padded to fewer.
        """
        return () if self._graphs is None else self._graphs.piecewise_sizes

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [rows, vocab] of batch.logit_rows, in the model's dtype; keys and values are kept.

        The result belongs to the caller, who may change it in place.
        """
        if self._graphs is not None and self._graphs.fit(batch):
            return self.model.logits(self._graphs.forward(batch))
        return self.forward_eager(batch)

    @torch.inference_mode()
    def forward_eager(self, batch: Batch) -> torch.Tensor:
        """What `forward` returns, computed without CUDA graphs."""
        self._attention.plan(batch)
        hidden = self.model.forward(batch, self._kv, self._weights, self._attention)
        return self.model.logits(hidden[batch.logit_rows])


def raise_if_lost(device: torch.device, error: BaseException) -> None:
    """Raise DeviceLost if `error` has left the device unusable."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as lost:  # an error of the device stays; any other is over by now
        raise DeviceLost(f"{device} failed and stays so: {error}") from lost
