"""Storage of the values."""

from collections.abc import Callable

import torch
from safetensors.torch import save_file

from lorikeet_engine.adapter_format import WEIGHTS_FILE
from tests.corpus.draft import Draft, Tensors
from tests.corpus.features import EQUAL, Axis, Build, Feature


def _stored(*dtypes: torch.dtype) -> Build:
    """Store the tensors in these dtypes, in turn; the truth has the same values in float32.

    Copies of the base model's tensors stay as they are: PEFT would compute with their rounded
    values.
    """

    def build(draft: Draft) -> None:
        def store(tensors: Tensors) -> Tensors:
            return {
                name: tensor if "base_layer" in name else tensor.to(dtypes[number % len(dtypes)])
                for number, (name, tensor) in enumerate(tensors.items())
            }

        draft.edit_weights(store)
        same = {name: tensor.float() for name, tensor in draft.tensors().items()}
        save_file(same, draft.truth / WEIGHTS_FILE, {"format": "pt"})

    return build


def _everywhere(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Build:
    """Feature that changes every tensor of the adapter and of the truth."""
    return lambda draft: draft.edit_both(lambda t: {n: change(n, v) for n, v in t.items()})


def _is_b(name: str) -> bool:
    return "lora_B" in name or "lora_embedding_B" in name


def _large_scale(name: str) -> float:
    """Return a tensor's factor: a large one for B, its inverse for A, one for a copied weight."""
    if _is_b(name):
        return 1e6
    return 1e-6 if "lora_" in name else 1.0


def _first_is(value: float, dtype: torch.dtype = torch.float32) -> Build:
    """Feature that stores one number that no adapter should contain."""

    def build(draft: Draft) -> None:
        def spoil(tensors: Tensors) -> Tensors:
            spoilt = {name: tensor.to(dtype) for name, tensor in tensors.items()}
            next(tensor for name, tensor in spoilt.items() if "lora_B" in name)[-1, -1] = value
            return spoilt

        draft.edit_weights(spoil)

    return build


def _numbers(name: str, build: Build, says: str = EQUAL, *, silent: bool = False) -> Feature:
    return Feature(name, Axis.NUMBERS, build, says, silent=silent)


NUMBERS: tuple[Feature, ...] = (
    _numbers("float16", _stored(torch.float16)),
    _numbers("bfloat16", _stored(torch.bfloat16)),
    _numbers("float64", _stored(torch.float64)),
    _numbers("float8 e4m3", _stored(torch.float8_e4m3fn)),
    _numbers("float8 e5m2", _stored(torch.float8_e5m2)),
    _numbers("several dtypes", _stored(torch.float32, torch.bfloat16, torch.float16)),
    _numbers("float64 beside float8", _stored(torch.float64, torch.float8_e4m3fn)),
    _numbers(
        "subnormal numbers",
        _everywhere(lambda name, t: t * 1e-39 if "layers.0" in name and "lora_A" in name else t),
    ),
    _numbers("B still zero", _everywhere(lambda name, t: t * 0 if _is_b(name) else t), silent=True),
    _numbers("large numbers", _everywhere(lambda name, t: t * _large_scale(name))),
    _numbers("NaN", _first_is(float("nan")), "holds NaN or Inf"),
    _numbers("infinity", _first_is(float("-inf"), torch.bfloat16), "holds NaN or Inf"),
    _numbers("NaN in float8", _first_is(float("nan"), torch.float8_e5m2), "holds NaN or Inf"),
    _numbers(
        "float64 above float32",
        _first_is(1e300, torch.float64),
        "float32 cannot hold|holds NaN or Inf",
    ),
    _numbers("integers", _stored(torch.int8), "has dtype 'I8': convert it|is no tensor of"),
)
