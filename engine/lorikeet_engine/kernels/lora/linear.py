"""Linear layer: the base model's product and, with LoRA, the delta of each token's adapter.

On the CPU y = x·Wᵀ + B·A·x is computed at once (reference.py). On CUDA the Triton kernels of
shrink.py and expand.py compute the delta on a side stream, joined when both are done, and the
kernel of kernels/pointwise/fused.py that reads y next adds the delta:

    main  ── x ──┬── product, on some of the multiprocessors ──┬── y and the delta are read
    side         └── shrink ── expand ─────────── delta ───────┘

LoRA's kernels wait for memory more than they use it, and a large product leaves memory idle. cuBLAS
would use every multiprocessor from start to end, so that LoRA could only run before or after the
product. So cuBLAS is made to leave some free (_sms_for_lora). Our own kernels, for products of one
token, or of few tokens with FP8 weights, need no such limit: LoRA is launched before them.

In a step whose adapters have vectors (LoraWeights.vectors), which scale the product itself, expand
runs behind both instead, and changes y.

A base model's weight is a tensor of floats, FP8 (kernels/fp8), or of 4 bits (kernels/w4a16); LoRA
always reads x unrounded. Memory that the side stream allocates is safe to use on the main stream:
before its next work, the side stream waits for the main stream.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import repeat
from typing import Any

import torch
from torch.nn import functional as F

from lorikeet_engine.kernels import fp8, w4a16
from lorikeet_engine.kernels.fp8 import Activations, Fp8Rows, PartlyFp8
from lorikeet_engine.kernels.lora import reference
from lorikeet_engine.kernels.lora.types import (
    LoraDelta,
    LoraGroup,
    LoraStep,
    LoraWeights,
    Segments,
    UnexpandedDelta,
)
from lorikeet_engine.kernels.pointwise import act_and_mul
from lorikeet_engine.kernels.w4a16 import PackedWeight, StackedWeight

Weight = torch.Tensor | Fp8Rows
"""Weight [d_out, d_in] of a linear layer, in floats or FP8."""


FusedWeight = Weight | PartlyFp8 | PackedWeight | StackedWeight
"""Weight [sum(d_outs), d_in] of fused linears."""


Inputs = torch.Tensor | Activations
"""Input [tokens, d_in] of a linear layer: a tensor or, for FP8 weights, Activations, which hold the
input and the input rounded to FP8.
"""


def linear(x: Inputs, weight: FusedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x·Wᵀ + b without LoRA.

    x [tokens, d_in]
    weight: W [d_out, d_in]
    bias: b [d_out]; None with PartlyFp8
    → [tokens, d_out] like x; float32 if the weight is a float32 tensor

    cuBLAS multiplies, or on CUDA for a single token of a 16-bit dtype our Triton kernel
    (kernels/gemv.py). With an FP8 weight x is rounded to FP8 first (kernels/fp8), a weight of 4
    bits is decoded while it is multiplied (kernels/w4a16).
    """
    if isinstance(weight, PartlyFp8):
        assert bias is None
        return torch.cat([linear(x, weight.first), linear(x, weight.others)], dim=1)
    if isinstance(weight, StackedWeight):
        biases = [None] * len(weight.parts) if bias is None else torch.split(bias, weight.heights)
        products = map(linear, repeat(x), weight.parts, biases)
        return torch.cat(list(products), dim=1)
    if isinstance(weight, PackedWeight):
        return w4a16.linear(rows_of(x), weight, bias)
    if isinstance(weight, Fp8Rows):
        rounded = x.fp8 if isinstance(x, Activations) else None
        return fp8.linear(rows_of(x), weight, bias, rounded)
    x = rows_of(x)
    if weight.dtype == torch.float32:
        return F.linear(x.float(), weight, bias)
    if _is_gemv(x):
        y: torch.Tensor = _cuda("gemv").gemv(x, weight, bias)
        return y
    return F.linear(x, weight, bias)


def linear_act_and_mul(
    x: Inputs, weight: FusedWeight, bias: torch.Tensor | None, *, gelu: bool
) -> Inputs:
    """Compute act_and_mul(x·Wᵀ + b), a linear without LoRA and its activation (kernels/pointwise).

    One launch computes both where gemv multiplies: on CUDA, for one token of a 16-bit dtype.

    x [tokens, d_in], weight [2 · width, d_in], bias [2 · width]: as for `linear`
    gelu: GELU instead of SiLU
    → [tokens, width]
    """
    rows = rows_of(x)
    if not _is_gemv(rows) or isinstance(weight, PackedWeight | StackedWeight):
        return act_and_mul(linear(x, weight, bias), gelu=gelu)
    y: torch.Tensor = _cuda("gemv").gemv_act_and_mul(rows, weight, bias, gelu=gelu)
    return y


def _is_gemv(x: torch.Tensor) -> bool:
    return x.is_cuda and len(x) == 1 and x.dtype.itemsize == 2


def rows_of(x: Inputs) -> torch.Tensor:
    """Return the unrounded input of a linear, which LoRA reads."""
    return x.rows if isinstance(x, Activations) else x


def begin_step(weights: LoraWeights, segments: Segments, tokens: int) -> LoraStep:
    """Prepare the LoRA work of a forward pass; on CUDA by one launch, the first of the pass.

    segments: the tokens of each adapter.
    tokens: number of tokens of the pass.
    """
    tiles = None
    if weights.arena.device.type == "cuda":
        tiles = _cuda("lora.tiles").list_tiles(segments, tokens)
    return LoraStep(weights, segments, tiles)


def linear_with_lora(
    x: Inputs,
    weight: FusedWeight,
    bias: torch.Tensor | None,
    step: LoraStep | None,
    layer: int,
    group: LoraGroup,
) -> tuple[torch.Tensor, LoraDelta | None]:
    """Compute y = x·Wᵀ + b and the adapters' delta B(t)·A(t)·x[t].

    x [tokens, d_in]
    weight: W [sum(d_outs), d_in]
    bias: b [sum(d_outs)]
    step: LoRA work of the forward pass; None: no adapter
    layer, group: index of the layer, and the fused linears of which W is the weight
    → y [tokens, sum(d_outs)]
    → delta, rows [tokens, sum(d_outs)]; None: no adapter, or the delta is already in y (on a CPU,
      and in steps whose adapters have vectors, a gain and a bias of outputs, which are then applied
      to y)

    The delta is rounded to x's dtype before it is added to y, an additional rounding. Raises
    ShapeError if an operand's shape or layout does not fit.
    """
    if step is not None and step.tiles is not None and step.segments.has_vectors:
        y, shrunk = linear_and_lora(x, weight, bias, step, layer, group)
        _cuda("lora.expand").expand(shrunk, y, add=True)
        return y, None
    if step is not None and step.tiles is not None:
        rows = rows_of(x)
        delta = rows.new_empty((len(rows), sum(group.d_outs)))
        y, _ = linear_and_lora(x, weight, bias, step, layer, group, delta)
        return y, LoraDelta(delta, step.tiles.tokens)
    y = linear(x, weight, bias)
    if step is not None:
        reference.add_lora(y, rows_of(x), step.weights, step.segments, layer, group)
    return y, None


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: LoraWeights,
    segments: Segments,
    layer: int,
    group: LoraGroup,
) -> None:
    """Compute y[t] += B(t)·A(t)·x[t], in place, for lm_head, which reads only some tokens of a
    forward pass.

    x [tokens, d_in], y [tokens, sum(d_outs)]: rows of the selected tokens
    segments: runs of these rows that share an adapter

    On CUDA an additional launch lists the tiles of these tokens. Raises ShapeError if an operand's
    shape or layout does not fit.
    """
    if y.device.type != "cuda":
        reference.add_lora(y, x, weights, segments, layer, group)
        return
    tiles = _cuda("lora.tiles").list_tiles(segments, len(x))
    shrunk: UnexpandedDelta = _cuda("lora.shrink").shrink(x, weights, tiles, layer, group)
    _cuda("lora.expand").expand(shrunk, y, add=True)


def linear_with_lora_before_act(
    x: Inputs,
    weight: FusedWeight,
    bias: torch.Tensor | None,
    step: LoraStep | None,
    layer: int,
    group: LoraGroup,
) -> tuple[torch.Tensor, LoraDelta | UnexpandedDelta | None]:
    """Compute gate_up's product x·Wᵀ + b and the adapters' delta, both of which act_and_mul reads.

    In a prefill on CUDA, a step of more tokens than any decode, the delta is returned as an
    UnexpandedDelta, v = A·x, and act_and_mul multiplies v by B. That requires that gate and up are
    two linears; if they are stored as one, the delta is always returned as a LoraDelta.

    Arguments, and the result otherwise: as for linear_with_lora.
    """
    if step is None or step.tiles is None or not step.tiles.act_expands or len(group.linears) != 2:
        return linear_with_lora(x, weight, bias, step, layer, group)
    return linear_and_lora(x, weight, bias, step, layer, group)


def linear_and_lora(
    x: Inputs,
    weight: FusedWeight,
    bias: torch.Tensor | None,
    step: LoraStep,
    layer: int,
    group: LoraGroup,
    delta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, UnexpandedDelta]:
    """Launch a product on the current stream and its LoRA on a second stream, and join them.

    x [tokens, d_in], weight [sum(d_outs), d_in], bias [sum(d_outs)]: operands of the product
    layer, group: index of the layer, and its fused linears
    delta [tokens, sum(d_outs)]: output for LoRA's delta B·v; None: the delta stays unexpanded
    → y [tokens, sum(d_outs)], and v = A·x, both ready for use on the current stream
    """
    rows = rows_of(x)
    main, side = torch.cuda.current_stream(rows.device), _side_stream(rows.device)
    most: Weight | PackedWeight | StackedWeight
    most = weight.first if isinstance(weight, PartlyFp8) else weight
    sms = _sms_for_lora(step, most, rows)
    side.wait_stream(main)
    if sms:
        reserve = _reserve_sms_of_lt if isinstance(most, Fp8Rows) else _reserve_sms
        with reserve(sms, rows.device):
            y = linear(x, weight, bias)
    with torch.cuda.stream(side):
        shrink = _cuda("lora.shrink").shrink
        shrunk: UnexpandedDelta = shrink(rows, step.weights, step.tiles, layer, group)
        shrunk = replace(shrunk, has_vectors=step.segments.has_vectors)
        if delta is not None:
            _cuda("lora.expand").expand(shrunk, delta)
    if not sms:
        y = linear(x, weight, bias)
    main.wait_stream(side)
    return y, shrunk


def _sms_for_lora(
    step: LoraStep, weight: Weight | PackedWeight | StackedWeight, rows: torch.Tensor
) -> int:
    """Return the number of multiprocessors that the base model's product leaves free for LoRA.

    Returns 0 for products by our own kernels: of a single token (kernels/gemv.py), of few tokens
    with an FP8 weight (kernels/fp8/few_tokens.py), or of fewer tokens than DECODED_FROM with a
    weight of 4 bits (kernels/w4a16/fused.py). Then LoRA is launched first, and the product gets the
    multiprocessors that LoRA leaves.

    rows [tokens, d_in]: input of the product.
    """
    if len(rows) == 1:
        return 0
    if isinstance(weight, Fp8Rows):
        config_of = _cuda("fp8.few_tokens").product_config
        if config_of(weight, len(rows), rows.device) is not None:
            return 0
    is_packed = isinstance(weight, PackedWeight | StackedWeight)
    if is_packed and len(rows) < _cuda("w4a16.fused").DECODED_FROM:
        return 0
    sms: int = step.tiles.config.sms_for_lora(step.tiles.segments * step.tiles.max_rank)
    return sms


def replace_logits(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: LoraWeights,
    segments: Segments,
    layer: int,
    group: LoraGroup,
) -> None:
    """Overwrite logits of adapters' trained tokens, in place: y[r, id] = x[r] · row(id).

    row(id) is the row of lm_head that r's adapter has trained for token id.

    x [rows, hidden]: hidden states
    y [rows, vocabulary]: logits
    segments: the rows of each adapter; nothing is done if their max_rows is 0
    group: the adapters' trained head rows as a group of one linear
    """
    if segments.max_rows == 0:
        return
    if y.device.type != "cuda":
        reference.replace_logits(y, x, weights, segments, layer, group)
        return
    tiles = _cuda("lora.tiles").list_tiles(segments, len(x))
    most = segments.max_rows
    _cuda("lora.token_rows").replace_logits(y, x, weights, tiles, most, layer, group)


def embed_adapted(
    y: torch.Tensor,
    token_ids: torch.Tensor,
    step: LoraStep,
    layer: int,
    group: LoraGroup,
    rows: LoraGroup,
) -> None:
    """Replace embeddings of trained tokens, and add LoRA to embeddings, in place.

    No adapter has both trained embedding rows and LoRA on embeddings.

    y [tokens, hidden]: the base model's embeddings
    token_ids [tokens] int64
    group: the embeddings as a group of one linear
    rows: the adapters' trained embedding rows (EMBEDDING_ROWS) as a group of one linear
    """
    if step.tiles is None:
        reference.replace_embeddings(y, token_ids, step.weights, step.segments, layer, rows)
        reference.add_embedding_lora(y, token_ids, step.weights, step.segments, layer, group)
        return
    weights, tiles = step.weights, step.tiles
    gathered = _cuda("lora.gather").gather(token_ids, y, weights, tiles, layer, group, rows)
    _cuda("lora.expand").expand(gathered, y, add=True)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _reserve_sms(count: int, device: torch.device) -> Iterator[None]:
    """Make cuBLAS leave `count` multiprocessors free during a `with` block.

    Only matrix products that this thread launches leave them free.
    """
    library = _cublas()
    if library is None:
        yield
        return
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]
    total = torch.cuda.get_device_properties(device).multi_processor_count
    library.cublasSetSmCountTarget(handle, ctypes.c_int(total - count))
    try:
        yield
    finally:
        library.cublasSetSmCountTarget(handle, ctypes.c_int(0))


@contextmanager
def _reserve_sms_of_lt(count: int, _device: torch.device) -> Iterator[None]:
    """Keep `count` multiprocessors free of cuBLASLt's matrix products during the block.

    cuBLASLt does not obey cublasSetSmCountTarget. Its own setting holds for the whole process, in
    which only one thread launches matrix products.
    """
    torch._C._set_sm_carveout_experimental(count)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)


@cache
def _cublas() -> ctypes.CDLL | None:
    """Return the cuBLAS library that torch has loaded, or None if its name is not the usual one."""
    try:
        return ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")
    except OSError:
        return None


def _cuda(name: str) -> Any:
    # Imported only here: a machine without a GPU may have no Triton.
    return import_module(f"lorikeet_engine.kernels.{name}")
