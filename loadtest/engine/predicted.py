"""Expected token rate of a dense base model, from bytes, operations and Llama's measured row.

    expected(model) = roofline(model) · measured(Llama-3.1-8B) / roofline(Llama-3.1-8B)

roofline: output tokens per second of N prompts of p tokens at once and their answers of n tokens,
if nothing took time except

    operations(prompts) / P + Σ step_s(p + i) for i = 1 … n − 1
    step_s(context) = max(linears' bytes / B, 2 · linears' elements · N / P)
                    + max(head's bytes / B, 2 · head's elements · N / P)
                    + N · (a row of embeddings + KV bytes(context)) / B
    KV bytes(context) = Σ over layers: a token's keys and values · min(context, window)

- B: bytes per second. P: operations per second of bfloat16 products; twice as many for FP8.
- operations(prompts), in prefill.flops: linears for all tokens, attention within each layer's
  window, and the head for one token per sequence, which gives the first token of an answer.
- head: lm_head, whose vocabulary · hidden elements are read in every step, tied or not.

Llama's row fixes one number, the share of the roofline that this engine reaches on this GPU; other
shapes are assumed to reach the same share. Launches, norms and activations are included as far as
they grow in proportion. Extra ones of a family, and how well its sizes suit the kernels, are not.

Of the rows in docs/benchmarks.md, Llama's 11,891 tokens/s at 256 / 128 are 79% of the roofline. Its
27,752 at 16 / 256 are 70%, so the share of one work does not hold for another. Its 16,860 with FP8
weights are 84% of the rate expected here from 11,738 in bfloat16.
"""

import json
import math
import tempfile
from argparse import ArgumentTypeError
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from loadtest.engine import prefill
from loadtest.engine.offline import Work
from loadtest.engine.random_model import LLAMA_3_1_8B, write_config
from lorikeet_engine.execution.kv_tensors import kv_width
from lorikeet_engine.models.config import ModelConfig

BYTES_PER_S = 4.3e12
"""Bytes per second that an H200 reads.

Source: docs/benchmarks.md, "Decode steps" and the floors of "LoRA kernels".
"""
OPERATIONS_PER_S = 758e12
"""Operations per second of an H200 on bfloat16 matrices of 8,192 × 8,192.

Source: docs/benchmarks.md, "Prefill".
"""
FP8_TIMES = 2
"""Speed-up of FP8 products on tensor cores, from NVIDIA's datasheets of Hopper. Not measured."""
FLOAT_BYTES, FP8_BYTES = 2, 1
LLAMA = "llama-3.1-8b"
WORK = Work("base", 256, 128)
"""Work of Llama's row, and the only one that is predicted."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Lower bound on the time of a model's work on an H200.

    fp8_weights: whether the linears are FP8.
    fp8_kv: whether the KV cache is FP8.
    """

    config: ModelConfig
    fp8_weights: bool = False
    fp8_kv: bool = False

    def __post_init__(self) -> None:
        if self.config.shape.experts:
            raise ValueError(
                "the experts that tokens use decide the bytes read: want a dense model"
            )

    @property
    def linear_elements(self) -> int:
        """Elements of all layers' linears."""
        shape = self.config.shape
        places = product(range(shape.layers), range(len(shape.linears)))
        return sum(math.prod(shape.dims(n)) for layer, n in places if shape.has(layer, n))

    @property
    def head_elements(self) -> int:
        """Elements of lm_head."""
        return self.config.vocab_size * self.config.shape.hidden

    def kv_bytes(self, context: int) -> int:
        """Return the bytes that attention of one token reads in all layers.

        context: tokens up to and including the token itself.
        """
        shape = self.config.shape
        each = FP8_BYTES if self.fp8_kv else FLOAT_BYTES
        widths = (kv_width(shape, layer, "cuda") for layer in range(shape.layers))
        layers = zip(widths, self.config.windows, strict=True)
        return 2 * each * sum(width * min(context, window or context) for width, window in layers)

    def prompts_s(self, work: Work) -> float:
        """Return the seconds of all prompts' prefill; a prompt's last token gives the first token
        of its answer.
        """
        head = 2 * self.head_elements * work.requests
        linears = 2 * self.linear_elements * work.requests * work.prompt_tokens
        attention = prefill.flops(self.config, work.requests, work.prompt_tokens) - head - linears
        products_s = linears / self._linear_operations_per_s
        return products_s + (attention + head) / OPERATIONS_PER_S

    def step_s(self, sequences: int, context: int) -> float:
        """Return the seconds of a decode step.

        sequences: number of decoding sequences.
        context: tokens that each sequence sees, its own included.
        """
        each = FP8_BYTES if self.fp8_weights else FLOAT_BYTES
        linears, head = self.linear_elements, self.head_elements
        products_s = max(
            linears * each / BYTES_PER_S, 2 * linears * sequences / self._linear_operations_per_s
        )
        head_s = max(head * FLOAT_BYTES / BYTES_PER_S, 2 * head * sequences / OPERATIONS_PER_S)
        rows = self.kv_bytes(context) + FLOAT_BYTES * self.config.shape.hidden
        return products_s + head_s + sequences * rows / BYTES_PER_S

    def tokens_per_s(self, work: Work) -> float:
        """Return output tokens per second over the whole time of a work."""
        contexts = range(work.prompt_tokens + 1, work.prompt_tokens + work.output_tokens)
        steps_s = sum(self.step_s(work.requests, context) for context in contexts)
        return work.requests * work.output_tokens / (self.prompts_s(work) + steps_s)

    @property
    def _linear_operations_per_s(self) -> float:
        return OPERATIONS_PER_S * (FP8_TIMES if self.fp8_weights else 1)


def predicted_tokens_per_s(roofline: Roofline, llama_tokens_per_s: float) -> float:
    """Return the expected rate of WORK.

    llama_tokens_per_s: measured rate of WORK on Llama-3.1-8B's bfloat16 weights.
    """
    share = llama_tokens_per_s / Roofline(_llama()).tokens_per_s(WORK)
    return share * roofline.tokens_per_s(WORK)


def read_llama(given: str) -> float:
    """Read the output tokens per second of Llama's row: a number, or the JSON file of a run.

    Raises ArgumentTypeError if the text is neither, or the file is of another model or other
    weights.
    """
    if not Path(given).exists():
        try:
            return float(given.replace(",", ""))
        except ValueError as error:
            raise ArgumentTypeError(f"{given}: want tokens/s, or a run's JSON file") from error
    run = json.loads(Path(given).read_text())
    known = [run.get(key) for key in ("config", "weight_dtype", "kv_dtype", "tensor_parallel")]
    if known != [LLAMA, "auto", "auto", 1]:
        raise ArgumentTypeError(f"{given}: want a run of {LLAMA} in 16 bits on one GPU")
    for row in run["throughput"]:
        work = row["work"]
        lengths = work["name"], work["prompt_tokens"], work["output_tokens"]
        if lengths == (WORK.name, WORK.prompt_tokens, WORK.output_tokens):
            rate: float = row["tokens_per_s"][0]
            return rate
    raise ArgumentTypeError(f"{given}: has no row {WORK.label}")


def _llama() -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        return ModelConfig.from_folder(write_config(Path(folder), LLAMA_3_1_8B))
