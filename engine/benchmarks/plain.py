"""The plain path that an engine's tokens are held against: one sequence, one pass, no graphs."""

from array import array
from dataclasses import replace

import torch

from lorikeet_engine.batch_builder import build_batch
from lorikeet_engine.kernels.attention import SdpaAttention
from lorikeet_engine.models import Model
from lorikeet_engine.request import Request
from lorikeet_engine.residency.tiers import Tiers
from lorikeet_engine.runner import Runner
from lorikeet_engine.sequence import Chunk, Sequence

PAGE = 16


def plain_logits(model: Model, tiers: Tiers, request: Request, made: list[int]) -> torch.Tensor:
    """Logits [len(made), vocab] float32 from which each of `made` was to be drawn.

    The request has one prompt; its adapter is on the GPU.
    """
    prompt = request.prompts[0]
    sequence = Sequence(
        request, 0, arrival=0, max_tokens=len(made), stop_ids=frozenset(), seed=0, page_size=PAGE
    )
    sequence.tokens += made[:-1]
    pages = -(-len(sequence.tokens) // PAGE)
    sequence.pages = array("i", range(pages))
    lease = tiers.lease(request.adapter) if request.adapter else None
    sequence.lease = lease
    c = model.config
    kv = torch.zeros(
        (c.layers, 2, pages, PAGE, c.kv_heads, c.head_dim), dtype=model.dtype, device=model.device
    )
    batch = build_batch([Chunk.of(sequence, len(sequence.tokens))], PAGE, model.device)
    rows = torch.arange(len(prompt) - 1, len(sequence.tokens), device=model.device)
    runner = Runner(model, SdpaAttention(), tiers.weights, kv)
    logits = runner.forward(replace(batch, logit_rows=rows))
    if lease is not None:
        lease.release()
    return logits
