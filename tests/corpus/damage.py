"""Tensors that do not make up one adapter of this base model."""

import re
from collections.abc import Callable

import torch

from tests.corpus.bases import LAYERS
from tests.corpus.draft import Draft, Tensors
from tests.corpus.features import Axis, Build, Feature

_NO_PAIR = r"are not \[rank, d_in\], \[d_out, rank\]|the weights have rank"
_NOTHING = r"are not \[rank, d_in\].*: gather what ZeRO or FSDP keeps"
_NOT_OURS = "is not part of a LoRA adapter"


def _weights(change: Callable[[Tensors], Tensors]) -> Build:
    return lambda draft: draft.edit_weights(change)


def _each(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Build:
    return _weights(lambda tensors: {n: change(n, t) for n, t in tensors.items()})


def _without(part: str) -> Build:
    return _weights(lambda tensors: {n: t for n, t in tensors.items() if part not in n})


def _with(**shapes: tuple[int, ...]) -> Build:
    """Add tensors whose names have dots in place of two underscores."""
    added = {name.replace("__", "."): torch.ones(shape) for name, shape in shapes.items()}
    return _weights(lambda tensors: tensors | added)


def _half_missing(tensors: Tensors) -> Tensors:
    missing = next(name for name in tensors if "lora_B" in name)
    return {name: tensor for name, tensor in tensors.items() if name != missing}


def _swapped(tensors: Tensors) -> Tensors:
    other = {"lora_A": "lora_B", "lora_B": "lora_A"}
    return {re.sub("lora_[AB]", lambda side: other[side[0]], n): t for n, t in tensors.items()}


def _deeper(tensors: Tensors) -> Tensors:
    """Add a layer beyond the base model's last one."""
    last = {n: t for n, t in tensors.items() if f"layers.{LAYERS - 1}." in n}
    more = {n.replace(f"layers.{LAYERS - 1}.", f"layers.{LAYERS}."): t for n, t in last.items()}
    return tensors | more


def _twice(tensors: Tensors) -> Tensors:
    return tensors | {n.replace(".weight", ".second.weight"): t for n, t in tensors.items()}


def _aliased(tensors: Tensors) -> Tensors:
    """Add a copy of each tensor under a vision model's name."""
    return tensors | {
        n.replace(".model.layers.", ".model.language_model.layers."): t for n, t in tensors.items()
    }


def _fused(parts: tuple[str, ...], fused: str) -> Build:
    """Rename one module's tensors to the name of a module that fuses several."""

    def change(tensors: Tensors) -> Tensors:
        return {
            n.replace(parts[0], fused): t
            for n, t in tensors.items()
            if not any(part in n for part in parts[1:])
        }

    return _weights(change)


def _too_high(draft: Draft) -> None:
    draft.edit_weights(
        lambda tensors: {
            n: torch.ones(65, t.shape[1]) if "lora_A" in n else torch.ones(t.shape[0], 65)
            for n, t in tensors.items()
        }
    )
    draft.edit_config(r=65)


def _damage(name: str, build: Build, says: str) -> Feature:
    # Damage to an adapter of every linear, under PEFT's names.
    apart = frozenset({Axis.TRAINING, Axis.NUMBERS, Axis.TOOL, Axis.WRAPPING, Axis.PLACE})
    return Feature(name, Axis.DAMAGE, build, says, apart)


DAMAGE: tuple[Feature, ...] = (
    _damage("half of a pair", _weights(_half_missing), "is missing beside its other half"),
    _damage("A and B swapped", _weights(_swapped), _NO_PAIR),
    _damage("transposed", _each(lambda _, t: t.T), _NO_PAIR),
    _damage("rank zero", _each(lambda n, t: t[:0] if "lora_A" in n else t[:, :0]), _NOTHING),
    # Left empty by DeepSpeed's ZeRO 3, which keeps the values in other processes.
    _damage("all empty", _each(lambda _, t: t.flatten()[:0]), _NOTHING),
    # accelerate 1.10 to 1.14 with FSDP2 (pull request 4206 of huggingface/accelerate).
    _damage(
        "one process's shard",
        _each(lambda _, t: t[: -(-len(t) // 2)]),
        f"{_NO_PAIR}|was trained for another base model",
    ),
    _damage("of a convolution", _each(lambda _, t: t[..., None, None]), _NO_PAIR),
    _damage(
        "another rank than the config's",
        lambda draft: draft.edit_config(r=draft.rank + 1),
        "the weights have rank .* and the config says",
    ),
    _damage("a rank above the limit", _too_high, "the limit is 64 .LORIKEET_MAX_RANK"),
    _damage(
        "of a wider model",
        _each(lambda n, t: torch.cat([t, t], 1 if "lora_A" in n else 0)),
        "the adapter was trained for another base model",
    ),
    _damage("of a deeper model", _weights(_deeper), f"the base model has {LAYERS} layers"),
    _damage("without a layer", _without("layers.1."), "no weight is for it"),
    _damage("without a linear", _without("up_proj"), "no weight is for it"),
    _damage("nothing", _weights(lambda _: {}), "has no LoRA weights"),
    _damage("two adapters in one file", _weights(_twice), "two tensors are lora_A"),
    _damage("each module under two names", _weights(_aliased), "want those of one model"),
    _damage(
        "q, k and v as one", _fused(("q_proj", "k_proj", "v_proj"), "qkv_proj"), "cannot be adapted"
    ),
    _damage(
        "gate and up as one",  # fused as in Phi
        _fused(("gate_proj", "up_proj"), "gate_up_proj"),
        "gate_up_proj, which it leaves out|cannot be adapted",
    ),
    _damage(
        "experts",
        _fused(("mlp.up_proj",), "mlp.experts.0.up_proj"),
        "mlp.experts.0.up_proj cannot be adapted",
    ),
    _damage(
        "an encoder of speech beside it",
        _with(
            base_model__model__speech_encoder__blocks__0__qkv__lora_A__weight=(2, 64),
            base_model__model__speech_encoder__blocks__0__qkv__lora_B__weight=(64, 2),
        ),
        "speech_encoder.blocks.0.qkv cannot be adapted",
    ),
    _damage(
        "a classifier's head in a file of answers",
        _with(base_model__model__score__weight=(2, 64)),
        "heads are served for whole texts alone, of the task type SEQ_CLS",
    ),
    _damage(
        "a buffer of rotary embeddings",
        _with(base_model__model__model__layers__0__self_attn__rotary_emb__inv_freq=(8,)),
        _NOT_OURS,
    ),
    _damage(
        "the base model's weights beside it",
        _with(base_model__model__model__layers__0__mlp__up_proj__base_layer__weight=(96, 64)),
        "the base model's own weights are in the file",
    ),
    _damage(
        "DoRA's magnitudes without a word of it",
        _with(base_model__model__model__layers__0__mlp__up_proj__lora_magnitude_vector=(96,)),
        "is DoRA, and adapter_config.json does not say so",
    ),
    _damage(
        "AdaLoRA's scales",
        _with(base_model__model__model__layers__0__mlp__up_proj__lora_E=(4, 1)),
        _NOT_OURS,
    ),
)
