"""PEFT's adapter_config.json, reduced to the parts that affect the results.

PEFT's patterns are regular expressions. They are resolved to module names once, where the adapter
is packed: a reader of a blob looks names up, and never runs untrusted expressions.
"""

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from lorikeet_engine.adapter_format.experts.names import experts_kind
from lorikeet_engine.adapter_format.experts.unsloth import LAYOUT_KEY
from lorikeet_engine.adapter_format.expressions import Expressions, bad_config
from lorikeet_engine.adapter_format.families import EMBEDDINGS, HEAD, LayerKind
from lorikeet_engine.adapter_format.header import parse_json_object
from lorikeet_engine.adapter_format.peft_release import (
    LOST_BIASES,
    SAVED_BIASES,
    SCALED_EMBEDDINGS,
    is_before,
    training_release,
)
from lorikeet_engine.adapter_format.score_head import HEAD_MODULES
from lorikeet_engine.adapter_format.targets import check_targets, resolve_patterns
from lorikeet_engine.adapter_format.tensor_names import canonical_module, is_of_vision, is_outer
from lorikeet_engine.errors import AdapterRejected

_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
_UNDERSTOOD = frozenset(
    {
        "peft_type",
        "base_model_name_or_path",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "bias",
        "lora_bias",
        "use_dora",
        "finetuning_type",
        "init_lora_weights",
        "trainable_token_indices",
        "alora_invocation_tokens",
        LAYOUT_KEY,
    }
)
# Options that change only the training, and notes of trainers, which PEFT ignores.
_WITHOUT_EFFECT = frozenset(
    {
        "task_type",
        "auto_mapping",
        "peft_version",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "ensure_weight_tying",
        "runtime_config",
        "quantization_config",  # of the base model during training
        "velora_config",  # compresses activations for the backward pass
        "monteclora_config",  # samples around A, in training alone
        "fan_in_fan_out",  # PEFT applies it to Conv1D alone, which no served base model has
        "merge_weights",  # until PEFT 0.2: merge for evaluation
        "transformers_version",
        # modelscope/ms-swift 3602360, swift/tuners/lora.py: LoRA+'s learning rates, and dtypes
        "lora_dtype",
        "lorap_lr_ratio",
        "lorap_emb_lr",
        # axolotl-ai-cloud/axolotl 067b021, integrations/kernels/merge_aware_callback.py
        "nvfp4_merge_aware",
    }
)
# Unsloth's version, method and precision of training; ms-swift's type; what Python classes keep.
_NOTES = ("unsloth_", "swift_", "_")
_BIASES = ("none", "all", "lora_only", False, None)
_REASONS = {
    "modules_to_save": "whole modules cannot be served beside the base model, except lm_head, "
    "embed_tokens, and a head named score or classifier; train without the others",
    "loftq_config": "LoftQ changes the base model; train without it",
    "layer_replication": "replicated layers make another base model; train without them",
    "use_qalora": "QA-LoRA pools the layers' inputs; train with use_qalora=False",
    "use_bdlora": "block-diagonal LoRA is not supported; train a plain LoRA",
    "megatron_config": "Megatron's parallel layers are not supported; train on the plain model",
    "use_qa_lora": "QA-LoRA pools the layers' inputs; train with use_qa_lora=False",
    "enable_lora": "it adapts parts of a fused linear, as PEFT 0.2 did; train a plain LoRA",
    "arrow_config": "routing between adapters is not supported; register each adapter",
    "kasa_config": "KaSA changes the base model; train a plain LoRA",
}
_UNKNOWN = (
    "this option is not known: PEFT or another trainer may compute something else with it. If it "
    "is only a note of the trainer, remove it from adapter_config.json"
)
_OPTIONAL = {
    "alora_invocation_tokens",
    "experts_read_for",
    "families",
    "kinds",
    "lost_biases",
    "unscaled_embeddings",
}
_MOST_INVOCATION_TOKENS = 256
_OTHER_INITS = (
    "that method may change the base model; save again with "
    "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The LoRA config in the metadata of a blob, an adapter's file.

    rank_pattern: LoRA ranks by full module name; r for all other modules.
    alpha_pattern: alphas by full module name; lora_alpha for all other modules.
    families: families of base models in which each targeted linear has weights, so that the adapter
        fits. None: all families that have the linears with weights.
    kinds: for hybrid base models, the kinds that each layer may have: those in which each targeted
        linear of the layer has weights. Empty for a layer that the base model must not have.
    unscaled_embeddings: whether the adapter was trained by a release of PEFT that leaves out the
        scale of embeddings whose own module scales them.
    lost_biases: whether biases of the linears, if the base model has any, were trained with the
        adapter but not saved.
    experts_read_for: "gpt-oss" or "another base model", as whose the matrices of experts were read,
        if their shapes do not show which side is the input; else empty.
    alora_invocation_tokens: tokens from which on an activated LoRA changes a prompt; empty for
        other adapters.
    """

    base_model_name_or_path: str
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    peft_type: str = "LORA"
    families: Sequence[str] | None = None
    kinds: Sequence[Sequence[LayerKind]] = ()
    unscaled_embeddings: bool = False
    lost_biases: bool = False
    experts_read_for: str = ""
    alora_invocation_tokens: Sequence[int] = ()

    @classmethod
    def from_peft(
        cls,
        raw: Mapping[str, Any],
        modules: Iterable[str],
        warn: Callable[[str], object] = lambda _: None,
    ) -> "LoraConfig":
        """Parse PEFT's config for the modules that have weights.

        raw: PEFT's config, which refuse_unsupported has accepted.
        modules: modules that have weights, in the trainer's naming. In the result, the keys of
            rank_pattern and alpha_pattern are their names in blobs (stored adapters).
        warn: called with a sentence if releases of PEFT read the config differently, and the config
            does not show which release trained the adapter.

        Raises AdapterRejected if a value cannot be served, or if the config does not select exactly
        these modules.
        """
        modules = sorted(modules)
        with Expressions() as run:
            bases = check_targets(raw, modules, run)
            ranks, alphas = resolve_patterns(raw, modules, run, warn)
        r, alpha = raw.get("r", 8), raw.get("lora_alpha", 8)
        return _checked(
            base_model_name_or_path=raw.get("base_model_name_or_path") or "",
            r=r,
            lora_alpha=alpha,
            use_rslora=raw.get("use_rslora") or False,
            rank_pattern={canonical_module(m): rank for m, rank in ranks.items() if rank != r},
            alpha_pattern={canonical_module(m): a for m, a in alphas.items() if a != alpha},
            families=bases.families,
            kinds=bases.kinds,
            unscaled_embeddings=_is_unscaled(raw, modules, warn),
            lost_biases=_has_lost_biases(raw, warn),
            alora_invocation_tokens=raw.get("alora_invocation_tokens") or (),
        )

    @classmethod
    def from_json(cls, text: str) -> "LoraConfig":
        """Parse the JSON of the config in the metadata of an adapter's file.

        Raises AdapterRejected if the text is not JSON, or has other keys or values than `to_json`
        writes.
        """
        raw = parse_json_object(text, "__metadata__.lorikeet")
        names = {field.name for field in fields(cls)}
        if set(raw) | _OPTIONAL != names:
            odd = sorted((set(raw) | _OPTIONAL) ^ names)
            raise AdapterRejected(
                f"the blob's config has other keys than expected: {reprlib.repr(odd)}", field=odd[0]
            )
        return _checked(**raw)

    def to_json(self) -> str:
        """Return the config as canonical JSON: equal configs give equal texts."""
        named = asdict(self)
        for key in _OPTIONAL:
            if not named[key]:
                del named[key]
        return json.dumps(named, sort_keys=True, separators=(",", ":"))

    def rank(self, module: str) -> int:
        """Return the rank of a module, for instance model.layers.0.mlp.up_proj."""
        return self.rank_pattern.get(module, self.r)

    def scaling(self, module: str) -> float:
        """Return the factor of a module's B @ A: alpha / rank, or alpha / sqrt(rank) for rsLoRA."""
        alpha, rank = self.alpha_pattern.get(module, self.lora_alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Raise AdapterRejected for an option that PEFT can train and no engine can serve.

    DoRA and biases are accepted here, and refused later for modules that cannot have them
    (vectors.py).

    raw: PEFT's config.
    """
    if raw.get("peft_type") != "LORA":
        raise _bad("only LORA adapters can be served", "peft_type", raw.get("peft_type"))
    if raw.get("bias") not in _BIASES:
        raise _bad("want none, all or lora_only", "bias", raw["bias"])
    if raw.get("finetuning_type", "lora") != "lora":
        raise _bad("only LoRA can be served", "finetuning_type", raw["finetuning_type"])
    init = raw.get("init_lora_weights", True)
    if not (init is None or isinstance(init, bool) or str(init).lower() in _PLAIN_INITS):
        raise _bad(_OTHER_INITS, "init_lora_weights", init)
    if raw.get("lora_alpha", 8) == 0:
        raise _bad(
            "the adapter would change nothing; give the alpha of the training", "lora_alpha", 0
        )
    if raw.get("alora_invocation_tokens") and raw.get("target_parameters"):
        raise _bad(
            "PEFT cannot activate LoRA of parameters from a token on; name linears in "
            "target_modules, or train a plain LoRA",
            "target_parameters",
            raw["target_parameters"],
        )
    for key, value in raw.items():
        known = key in _UNDERSTOOD | _WITHOUT_EFFECT or key.startswith(_NOTES)
        if value and not known and not _is_served(key, value):
            raise _bad(_REASONS.get(key, _UNKNOWN), key, value)


def _is_unscaled(
    raw: Mapping[str, Any], modules: Iterable[str], warn: Callable[[str], object]
) -> bool:
    """Whether the adapter was trained by a release of PEFT that left out the scale of embeddings.

    False if the adapter does not change embeddings.

    raw: PEFT's config.
    warn: called with a sentence if the config does not show the release.
    """
    adapts = any(is_outer(module, EMBEDDINGS) for module in modules)
    if not adapts and not raw.get("trainable_token_indices"):
        return False
    base = raw.get("base_model_name_or_path")
    if training_release(raw) is None and isinstance(base, str) and "gemma" in base.lower():
        warn(
            "PEFT before 0.18 adds LoRA to Gemma 3's embeddings without their scale, and "
            "adapter_config.json does not show which release trained: served as the newest "
            "computes it; set peft_version to the release that trained"
        )
    return is_before(raw, SCALED_EMBEDDINGS)


def _has_lost_biases(raw: Mapping[str, Any], warn: Callable[[str], object]) -> bool:
    """Whether biases may have been trained with the adapter but not saved.

    Some releases of PEFT train the biases of bias="lora_only" without saving them.

    raw: PEFT's config.
    warn: called with a sentence if so.
    """
    release = training_release(raw)
    saves = release is not None and not LOST_BIASES <= release < SAVED_BIASES
    if raw.get("bias") != "lora_only" or saves:
        return False
    warn(
        "PEFT before 0.21 does not save the biases that bias='lora_only' trains: answers are those "
        "of the training only if no adapted linear of the base model has a bias"
    )
    return True


def _is_served(key: str, value: Any) -> bool:
    """Whether an option is modules_to_save and names only modules that can be served: a
    classification head, lm_head, embed_tokens, and modules of a vision part, whose tensors are not
    stored.
    """
    names = value if isinstance(value, list) else [None]
    return key == "modules_to_save" and all(
        isinstance(name, str)
        and (
            name in HEAD_MODULES
            or is_of_vision(name)
            or is_outer(name, HEAD)
            or is_outer(name, EMBEDDINGS)
        )
        for name in names
    )


def _checked(**raw: Any) -> LoraConfig:
    base_model = raw["base_model_name_or_path"]
    if not isinstance(base_model, str) or len(base_model) > 512:
        raise _bad("want a text of at most 512 characters", "base_model_name_or_path", base_model)
    if raw.get("peft_type", "LORA") != "LORA":
        raise _bad("want LORA", "peft_type", raw["peft_type"])
    if not isinstance(raw["use_rslora"], bool):
        raise _bad("want true or false", "use_rslora", raw["use_rslora"])
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(raw[key], dict):
            raise _bad("want an object", key, raw[key])
    families = raw.get("families")
    if families is not None and not (
        _is_list(families) and all(isinstance(each, str) for each in families)
    ):
        raise _bad("want names of families", "families", families)
    for key in ("lost_biases", "unscaled_embeddings"):
        if not isinstance(raw.get(key, False), bool):
            raise _bad("want true or false", key, raw[key])
    kinds_of_experts = ("", *(experts_kind(clamped=clamped) for clamped in (False, True)))
    if raw.get("experts_read_for", "") not in kinds_of_experts:
        raise _bad("want a kind of base model", "experts_read_for", raw["experts_read_for"])
    invocation = raw.get("alora_invocation_tokens", ())
    if (
        not _is_list(invocation)
        or not all(type(token) is int and 0 <= token < 2**31 for token in invocation)
        or len(invocation) > _MOST_INVOCATION_TOKENS
    ):
        want = f"want at most {_MOST_INVOCATION_TOKENS} token ids"
        raise _bad(want, "alora_invocation_tokens", invocation)
    raw["alora_invocation_tokens"] = tuple(invocation)
    kinds = raw.get("kinds", ())
    if not _is_list(kinds) or not all(_is_list(layer) for layer in kinds):
        raise _bad(f"want lists of {' and '.join(LayerKind)}", "kinds", kinds)
    known = {kind.value: kind for kind in LayerKind}
    if any(kind not in [*known] for layer in kinds for kind in layer):
        raise _bad(f"want lists of {' and '.join(LayerKind)}", "kinds", kinds)
    raw["kinds"] = tuple(tuple(known[kind] for kind in layer) for layer in kinds)
    raw["families"] = None if families is None else tuple(families)
    raw["lora_alpha"] = _alpha(raw["lora_alpha"], "lora_alpha")
    raw["alpha_pattern"] = {k: _alpha(v, "alpha_pattern") for k, v in raw["alpha_pattern"].items()}
    _check_rank(raw["r"], "r")
    for rank in raw["rank_pattern"].values():
        _check_rank(rank, "rank_pattern")
    return LoraConfig(**raw)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _check_rank(value: Any, key: str) -> None:
    if type(value) is not int or not 1 <= value < 2**31:
        raise _bad("want a rank, an integer ≥ 1", key, value)


def _alpha(value: Any, key: str) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e9:
        raise _bad("want an alpha, a number below 1e9", key, value)
    return float(value)


def _bad(message: str, key: str, value: Any) -> AdapterRejected:
    return bad_config(f"{reprlib.repr(value)}: {message}", key)
