"""Adapters of gpt-oss, in each form that trainers save.

Which way round PEFT saves a parameter was seen by findings/peft_gpt_oss_orientation.sh. Builders of
other trainers' forms name the version and file followed.
"""

from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file

from lorikeet_engine.adapter_format import MLX_WEIGHTS_FILE, WEIGHTS_FILE
from tests.corpus.bases import LAYERS
from tests.corpus.cases import cases_of
from tests.corpus.draft import Draft, Tensors
from tests.corpus.features import Build, Feature, renamed, then, tool
from tests.corpus.peft_training import by_peft
from tests.engine.moe_adapters import BOTH

FAMILY = "gpt_oss"
_PREFIX = "base_model.model."
_WRAPPERS = {"gate_up_proj": "mlp.experts.base_layer", "down_proj": "mlp.experts"}
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_ROUTER = "mlp.router.weight"

Write = Callable[[str, str, torch.Tensor, torch.Tensor], Tensors]
"""Function that returns a trainer's tensors of one parameter in one layer.

Takes the layer's path, the parameter's name, A [experts, rank, d_in] and B [experts, d_out, rank].
"""


def _rewrite(draft: Draft, write: Write) -> None:
    """Replace the tensors of experts in the weights file, not in the truth."""

    def change(tensors: Tensors) -> Tensors:
        found = {name: t for name, t in tensors.items() if ".experts." not in name}
        for layer in range(LAYERS):
            path = f"{_PREFIX}model.layers.{layer}"
            for parameter, wrapper in _WRAPPERS.items():
                a, b = (tensors[f"{path}.{wrapper}.lora_{side}.weight"] for side in "AB")
                count = draft.base.shape.experts
                by_expert = b.view(len(b), -1, count).permute(2, 0, 1)
                found |= write(path, parameter, a.view(count, -1, a.shape[1]), by_expert)
        return found

    draft.edit_weights(change)


def _pair(module: str, a: torch.Tensor, b: torch.Tensor) -> Tensors:
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def _by_linear(parameter: str, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return B of each linear of a parameter, by the linear's name."""
    if parameter == "down_proj":
        return {"down_proj": b}
    return {"gate_proj": b[:, 0::2], "up_proj": b[:, 1::2]}


def _turned(draft: Draft) -> None:
    """Turn the parameters, as PEFT since 0.19.1 does with transformers 4, and 0.19.0 with 5."""

    def write(path: str, parameter: str, a: torch.Tensor, b: torch.Tensor) -> Tensors:
        outputs, inputs = b.mT.flatten(0, 1), a.mT.permute(1, 2, 0).flatten(1)
        return _pair(f"{path}.{_WRAPPERS[parameter]}", outputs, inputs)

    _rewrite(draft, write)


def _unsloth_before(**keys: Any) -> Build:
    """Order B by experts, as Unsloth did before 2026.9.6.

    unslothai/unsloth-zoo 2026.10.9, unsloth_zoo/temporary_patches/moe_utils.py.

    keys: notes in the config about the order.
    """

    def write(path: str, parameter: str, a: torch.Tensor, b: torch.Tensor) -> Tensors:
        ordered = b.permute(1, 0, 2).flatten(1)
        return _pair(f"{path}.{_WRAPPERS[parameter]}", a.flatten(0, 1), ordered)

    def build(draft: Draft) -> None:
        _rewrite(draft, write)
        draft.edit_config(auto_mapping={"unsloth_fixed": True}, **keys)

    return build


def _unsloth_now(draft: Draft) -> None:
    """Note the order of B, which is PEFT's since 2026.9.6, in both places."""
    parameters = {name: {"lora_B_layout": "rank_major", "num_experts": 6} for name in _WRAPPERS}
    detail = {"lora_A_layout": "grouped_by_expert", "parameters": parameters}
    draft.edit_config(
        auto_mapping={"unsloth_fixed": True, "unsloth_fused_expert_lora": detail},
        unsloth_fused_expert_lora=detail | {"lora_B_layout": "rank_major"},
        lora_B_layout="rank_major",
    )


def _unsloth_lists(draft: Draft) -> None:
    """Name the matrices of each expert in lists, as Unsloth does for a base model in four bits.

    unslothai/unsloth 2026.10.9, unsloth/models/_utils.py, get_moe_target_modules.
    """
    experts = range(draft.base.shape.experts)

    def write(path: str, parameter: str, a: torch.Tensor, b: torch.Tensor) -> Tensors:
        found: Tensors = {}
        for number in experts:
            found |= _pair(f"{path}.mlp.experts.{parameter}s.{number}", a[number], b[number])
        return found

    _rewrite(draft, write)
    lists = [f"{name}s.{number}" for name in _WRAPPERS for number in experts]
    targets = [*draft.config()["target_modules"], *lists]
    draft.edit_config(target_modules=targets, target_parameters=None)


def _tinker(draft: Draft) -> None:
    """Save gate and up apart, stacked, and attention as attn, as Tinker does.

    tinker-cookbook 0.6.1, weights/_merge_gpt_oss.py and weights/_merge.py.
    """
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

    def write(path: str, parameter: str, a: torch.Tensor, b: torch.Tensor) -> Tensors:
        found: Tensors = {}
        for linear, own in _by_linear(parameter, b).items():
            found |= _pair(f"{path}.mlp.experts.{names[linear]}", a, own)
        return found

    _rewrite(draft, write)
    draft.rename(lambda name: name.replace(".self_attn.", ".attn."))
    draft.edit_config(target_modules="all-linear", target_parameters=None)


def _tinker_export(draft: Draft) -> None:
    """Save matrices of each expert's linears.

    tinker-cookbook 0.6.1, weights/_adapter.py, build_lora_adapter.
    """

    def write(path: str, parameter: str, a: torch.Tensor, b: torch.Tensor) -> Tensors:
        found: Tensors = {}
        for linear, own in _by_linear(parameter, b).items():
            for number in range(len(a)):
                found |= _pair(f"{path}.mlp.experts.{number}.{linear}", a[number], own[number])
        return found

    _rewrite(draft, write)
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name in draft.tensors()}
    draft.edit_config(target_modules=sorted(names), target_parameters=None)


def _prime(draft: Draft) -> None:
    """Write the config of prime-rl, whose files of gpt-oss are PEFT's.

    PrimeIntellect-ai/prime-rl 559b447, src/prime_rl/trainer/lora.py and
    trainer/models/layers/lora/multi_moe.py.
    """
    kept = {key: draft.config()[key] for key in ("r", "lora_alpha", "base_model_name_or_path")}
    common = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "lora_dropout": 0.0, "bias": "none"}
    targets = ["experts", *sorted(_ATTENTION)]
    draft.write_config({**common, **kept, "target_modules": targets, "modules_to_save": None})


def _mlx(draft: Draft) -> None:
    """Write the file and config of mlx_lm.lora 0.32.2: models/gpt_oss.py, tuner/lora.py."""
    config = draft.config()

    def write(path: str, parameter: str, a: torch.Tensor, b: torch.Tensor) -> Tensors:
        found: Tensors = {}
        for linear, own in _by_linear(parameter, b).items():
            found |= _pair(f"{path}.mlp.experts.{linear}", a, own)
        return found

    _rewrite(draft, write)
    tensors: Tensors = {}
    for name, tensor in draft.tensors().items():
        module, _, side = name.removeprefix(_PREFIX).partition(".lora_")
        stored = tensor if ".experts." in name else tensor.T
        tensors[f"{module}.lora_{side[0].lower()}"] = stored.contiguous()
    (draft.folder / WEIGHTS_FILE).unlink()
    save_file(tensors, draft.folder / MLX_WEIGHTS_FILE)
    lora = {"rank": config["r"], "scale": config["lora_alpha"] / config["r"], "dropout": 0.0}
    name = config["base_model_name_or_path"]
    draft.write_config({"fine_tune_type": "lora", "lora_parameters": lora, "model": name})


def _without(part: str) -> Build:
    """Leave out the tensors of a part of the names."""
    return lambda draft: draft.edit_weights(
        lambda tensors: {name: t for name, t in tensors.items() if part not in name}
    )


# Trained by PEFT itself.
TRAINED: tuple[Feature, ...] = (
    by_peft("all-linear", target_modules="all-linear"),
    by_peft("all-linear and both parameters", target_modules="all-linear", target_parameters=BOTH),
    by_peft(
        "experts of some layers",  # as OpenAI's and TRL's recipes for gpt-oss
        target_modules="all-linear",
        target_parameters=[f"{layer}.{parameter}" for layer in (0, 2) for parameter in BOTH],
    ),
    by_peft(
        "usual linears by name",
        target_modules=[*_ATTENTION, "gate_proj", "up_proj", "down_proj"],
        target_parameters=BOTH,
    ),
    by_peft("both parameters alone", target_parameters=BOTH),
    by_peft("gate_up_proj alone", target_parameters=BOTH[:1]),
    by_peft("down_proj alone", target_modules=["o_proj"], target_parameters=BOTH[1:]),
    by_peft("the router", target_parameters=[_ROUTER]),
    by_peft(
        "the router and experts", target_modules=["v_proj"], target_parameters=[_ROUTER, *BOTH]
    ),
    by_peft(
        "rsLoRA and patterns",
        target_modules=["q_proj"],
        target_parameters=BOTH,
        use_rslora=True,
        rank_pattern={"q_proj": 5},
        alpha_pattern={"q_proj": 3},
    ),
    by_peft("beside lm_head", target_modules=["lm_head", "embed_tokens"], target_parameters=BOTH),
    by_peft(
        "trained tokens",
        target_modules=["o_proj"],
        target_parameters=BOTH,
        trainable_token_indices=[5, 250],
    ),
    by_peft(
        "experts saved whole",
        "whole modules",
        target_modules=["q_proj"],
        modules_to_save=["experts"],
    ),
)
_WHOLE = by_peft("attention and experts", target_modules=_ATTENTION, target_parameters=BOTH)
# Forms of other trainers and releases, each of an adapter that PEFT has saved.
FORMS: tuple[Feature, ...] = (
    tool("parameters turned", _turned),
    tool("parameters turned by PEFT 0.19.0", lambda d: (_turned(d), _release(d, "0.19.0"))),
    tool("PEFT 0.18.1", lambda draft: _release(draft, "0.18.1")),
    tool("Unsloth", _unsloth_now),
    tool("Unsloth's old order, noted", _unsloth_before(lora_B_layout="grouped_by_expert")),
    tool("Unsloth's old order", _unsloth_before(), "Unsloth before 2026.9.6"),
    tool("orders mixed", _unsloth_before(lora_B_layout="mixed"), "want rank_major"),
    tool("Unsloth's lists", _unsloth_lists),
    tool(
        "Unsloth's lists without an expert",
        then(_unsloth_lists, _without("down_projs.3.")),
        "no weight is for it|none for expert 3",
    ),
    tool("Tinker", _tinker),
    tool("Tinker's export", _tinker_export),
    tool(
        "Tinker's export without an expert",
        then(_tinker_export, _without("experts.3.up_proj.")),
        "no weight is for it|none for expert 3",
    ),
    tool("prime-rl", _prime),
    tool("MLX", _mlx),
    tool(
        "a fused linear of each expert",
        then(_unsloth_lists, renamed(".gate_up_projs.", ".gate_up_proj.")),
        "cannot be adapted|which it leaves out",
    ),
    tool("the wrapper of one parameter is lost", _without(".experts.base_layer."), "parameter"),
)


def _release(draft: Draft, release: str) -> None:
    draft.edit_config(peft_version=release)


CASES = tuple(
    cases_of(
        (
            *(((each,), (FAMILY,)) for each in TRAINED),
            *(((_WHOLE, form), (FAMILY,)) for form in FORMS),
        )
    )
)
"""One case for each form."""
