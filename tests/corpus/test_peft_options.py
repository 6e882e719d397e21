"""Each option, initialization and method of the installed PEFT has a feature in the table."""

import shutil
from collections.abc import Mapping
from dataclasses import fields
from typing import get_args, get_type_hints

import peft
import pytest

from tests.corpus.register import Refusal, register
from tests.corpus.table import FEATURES

NAMES = {feature.name for feature in FEATURES}
# Fails when a release of PEFT adds an option: name the features that cover it.
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "task_type": ("a task",),
    "peft_type": ("IA3",),
    "auto_mapping": ("Unsloth's mapping",),
    "peft_version": ("without what is null or false",),
    "base_model_name_or_path": ("the served name", "no name"),
    "revision": ("a revision",),
    "inference_mode": ("still in training",),
    "r": ("another rank than the config's", "a fraction as rank"),
    "target_modules": ("all-linear", "targets as an expression", "targets as whole names"),
    "exclude_modules": ("modules excluded by name", "modules excluded by an expression"),
    "lora_alpha": ("a fraction as alpha", "alpha that nobody set"),
    "lora_dropout": ("dropout",),
    "fan_in_fan_out": ("fan_in_fan_out beside other linears",),
    "bias": ("bias all", "bias lora_only"),
    "use_rslora": ("rsLoRA", "rsLoRA with a rank_pattern"),
    "modules_to_save": ("lm_head saved whole", "embed_tokens saved whole", "norms saved whole"),
    "init_lora_weights": ("gaussian", "PiSSA, not converted"),
    "layers_to_transform": ("some layers",),
    "layers_pattern": ("one layer under its pattern",),
    "rank_pattern": ("rank_pattern",),
    "alpha_pattern": ("alpha_pattern",),
    "megatron_config": ("megatron_config",),
    "megatron_core": ("Megatron's core",),
    "trainable_token_indices": ("trained tokens", "trained tokens by module"),
    "loftq_config": ("loftq_config",),
    "eva_config": ("EVA", "configs of what did not happen"),
    "corda_config": ("CorDA, converted", "CorDA, not converted"),
    "lora_ga_config": ("LoRA-GA, converted", "LoRA-GA, not converted"),
    "use_dora": ("DoRA", "DoRA with rsLoRA and patterns"),
    "velora_config": ("VeLoRA",),
    "alora_invocation_tokens": (
        "activated LoRA",
        "activated LoRA on lm_head",
        "an empty invocation",
    ),
    "use_qalora": ("use_qalora",),
    "qalora_group_size": ("QA-LoRA's group size",),
    "monteclora_config": ("MonteCLoRA",),
    "layer_replication": ("layers replicated",),
    "runtime_config": ("offloaded while training",),
    "lora_bias": ("a bias of B", "lora_bias"),
    "target_parameters": ("bare parameters",),
    "use_bdlora": ("use_bdlora",),
    "arrow_config": ("arrow_config",),
    "kasa_config": ("kasa_config",),
    "ensure_weight_tying": ("weight tying ensured",),
}
INITIALIZATIONS: Mapping[str, tuple[str, ...]] = {
    "gaussian": ("gaussian", "Gaussian"),
    "eva": ("EVA",),
    "olora": ("OLoRA, converted", "OLoRA, not converted"),
    "pissa": ("PiSSA, converted", "PiSSA, not converted"),
    "pissa_niter_[number of iters]": ("PiSSA by iterations, converted",),
    "corda": ("CorDA, converted", "CorDA, not converted"),
    "loftq": ("init_lora_weights: loftq",),
    "orthogonal": ("orthogonal",),
    "mica": ("MiCA",),
}


@pytest.mark.parametrize("listed", [OPTIONS, INITIALIZATIONS], ids=["options", "initializations"])
def test_every_listed_feature_is_in_the_table(listed: Mapping[str, tuple[str, ...]]) -> None:
    assert all(NAMES.issuperset(names) for names in listed.values())


def test_every_option_of_lora_is_listed() -> None:
    assert {field.name for field in fields(peft.LoraConfig)} == OPTIONS.keys()


def test_every_initialization_of_lora_is_listed() -> None:
    kinds = get_args(get_type_hints(peft.LoraConfig)["init_lora_weights"])
    (initializations,) = [get_args(kind) for kind in kinds if hasattr(kind, "__args__")]
    assert set(initializations) == INITIALIZATIONS.keys()


@pytest.mark.parametrize("method", sorted(set(peft.PeftType) - {peft.PeftType.LORA}))
def test_every_method_but_lora_is_refused_by_name(method, stand, draft_of) -> None:
    draft = draft_of()
    shutil.copytree(stand("llama").beside.folder, draft.folder)
    draft.edit_config(peft_type=method.value)
    with pytest.raises(Refusal, match=f"peft_type: '{method.value}': only LORA"):
        register(draft)
