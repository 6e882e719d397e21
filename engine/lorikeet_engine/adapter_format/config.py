"""PEFT's adapter_config.json, reduced to what changes the numbers.

PEFT's patterns are regular expressions. They are resolved to module names once, where the adapter
is packed: whoever reads a blob later looks names up and never runs a stranger's expression.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lorikeet_engine.adapter_format.header import parse_json_object
from lorikeet_engine.adapter_format.shape import LINEARS
from lorikeet_engine.errors import AdapterRejected

CONFIG_FILE = "adapter_config.json"

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
        "bias",
        "init_lora_weights",
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        "task_type",
        "auto_mapping",
        "peft_version",
        "revision",
        "inference_mode",
        "exclude_modules",
        "lora_dropout",
        "fan_in_fan_out",
        "layers_to_transform",
        "layers_pattern",
        "megatron_core",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "ensure_weight_tying",
        "runtime_config",
    }
)
_REMEDIES = {
    "use_dora": "DoRA is not supported; train with use_dora=False",
    "modules_to_save": "whole modules cannot be served beside the base model; train without them",
    "lora_bias": "LoRA biases are not supported; train with lora_bias=False",
    "loftq_config": "LoftQ changes the base model; train without it",
    "trainable_token_indices": "trained tokens change the embeddings; train without them",
    "layer_replication": "replicated layers make another base model; train without them",
    "alora_invocation_tokens": "activated LoRA is not supported; train a plain LoRA",
}
_PLAIN_INITS = ("gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What a blob's metadata holds. The patterns' keys are whole module names."""

    base_model_name_or_path: str
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    peft_type: str = "LORA"

    @classmethod
    def from_peft(cls, raw: Mapping[str, Any], modules: Iterable[str]) -> "LoraConfig":
        """From PEFT's file, for the modules that the weights touch. Raises AdapterRejected."""
        _refuse_unsupported(raw)
        modules = sorted(modules)
        _check_targets(raw.get("target_modules"), modules)
        ranks = _resolve(raw, "rank_pattern", modules)
        alphas = _resolve(raw, "alpha_pattern", modules)
        r, alpha = raw.get("r", 8), raw.get("lora_alpha", 8)
        return _checked(
            base_model_name_or_path=raw.get("base_model_name_or_path") or "",
            r=r,
            lora_alpha=alpha,
            use_rslora=raw.get("use_rslora") or False,
            rank_pattern={name: rank for name, rank in ranks.items() if rank != r},
            alpha_pattern={name: value for name, value in alphas.items() if value != alpha},
        )

    @classmethod
    def from_json(cls, text: str) -> "LoraConfig":
        """From a blob's metadata. Raises AdapterRejected."""
        raw = parse_json_object(text, "__metadata__.lorikeet")
        names = {field.name for field in fields(cls)}
        if set(raw) != names:
            odd = sorted(set(raw) ^ names)
            raise _bad(f"the blob's config has other keys than expected: {odd}", odd[0])
        return _checked(**raw)

    def to_json(self) -> str:
        """Canonical: the same config always gives the same text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def rank(self, module: str) -> int:
        """The rank that the config gives this module, for instance model.layers.0.mlp.up_proj."""
        return self.rank_pattern.get(module, self.r)

    def scaling(self, module: str) -> float:
        """The factor of B @ A: alpha / rank, or alpha / sqrt(rank) for rsLoRA."""
        alpha, rank = self.alpha_pattern.get(module, self.lora_alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    peft_type = raw.get("peft_type")
    if peft_type != "LORA":
        raise _bad(f"peft_type={peft_type!r}: only LORA adapters can be served", "peft_type")
    if raw.get("bias", "none") != "none":
        raise _bad(f"bias={raw['bias']!r}: train with bias='none'", "bias")
    init = raw.get("init_lora_weights", True)
    if not (init is None or isinstance(init, bool) or init in _PLAIN_INITS):
        raise _bad(
            f"init_lora_weights={init!r} changes the base model: save again with "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)",
            "init_lora_weights",
        )
    for key, value in raw.items():
        if key not in _UNDERSTOOD | _WITHOUT_EFFECT and value:
            remedy = _REMEDIES.get(key, "this option is not supported; train without it")
            raise _bad(f"{key}={value!r}: {remedy}", key)


def _check_targets(targets: Any, modules: list[str]) -> None:
    """A list of targets and the weights name the same linears; other forms say nothing."""
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        return
    for target in targets:
        known = target.rpartition(".")[2] in LINEARS
        if known and not any(_is_suffix(target, module) for module in modules):
            raise _bad(f"target_modules names {target}, but no weight is for it", "target_modules")
    for module in modules:
        if not any(_is_suffix(target, module) for target in targets):
            raise _bad(f"there are weights for {module}, not in target_modules", "target_modules")


def _is_suffix(target: str, module: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _resolve(raw: Mapping[str, Any], key: str, modules: list[str]) -> dict[str, Any]:
    """The pattern's value for each module that it matches: PEFT takes the first key that does."""
    pattern = raw.get(key) or {}
    if not isinstance(pattern, Mapping):
        raise _bad(f"{key} must be an object", key)
    try:
        compiled = [(re.compile(rf"(.*\.)?({k})$"), value) for k, value in pattern.items()]
    except re.error as error:
        raise _bad(f"{key} has a key that is no regular expression: {error}", key) from error
    found = {}
    for module in modules:
        for expression, value in compiled:
            if expression.match(module):
                found[module] = value
                break
    return found


def _checked(**raw: Any) -> LoraConfig:
    base_model = raw["base_model_name_or_path"]
    if not isinstance(base_model, str) or len(base_model) > 512:
        raise _bad("want a text of at most 512 characters", "base_model_name_or_path")
    if raw.get("peft_type", "LORA") != "LORA":
        raise _bad("want peft_type LORA", "peft_type")
    if not isinstance(raw["use_rslora"], bool):
        raise _bad("want use_rslora true or false", "use_rslora")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(raw[key], dict):
            raise _bad(f"{key} must be an object", key)
    raw["lora_alpha"] = _alpha(raw["lora_alpha"], "lora_alpha")
    raw["alpha_pattern"] = {k: _alpha(v, "alpha_pattern") for k, v in raw["alpha_pattern"].items()}
    for rank, key in [
        (raw["r"], "r"),
        *((v, "rank_pattern") for v in raw["rank_pattern"].values()),
    ]:
        if type(rank) is not int or not 1 <= rank < 2**31:
            raise _bad(f"{key}: a rank of {rank!r}, want an integer ≥ 1", key)
    return LoraConfig(**raw)


def _alpha(value: Any, key: str) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e9:
        raise _bad(f"{key}: an alpha of {value!r}, want a number", key)
    return float(value)


def _bad(message: str, key: str) -> AdapterRejected:
    return AdapterRejected(f"{CONFIG_FILE}: {message}", field=key)
