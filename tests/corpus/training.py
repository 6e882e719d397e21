"""LoRA trained with PEFT: every option, saved by the installed PEFT."""

import shutil
from typing import Any

import peft
from peft.tuners.lora.config import CordaConfig, LoraGAConfig

from tests.corpus.draft import Draft
from tests.corpus.features import (
    EQUAL,
    Axis,
    Build,
    Feature,
)
from tests.corpus.peft_training import (
    EVERY_LINEAR,
    save,
    save_biased,
    save_combined,
    save_converted,
    save_disguised,
    save_eva,
    save_resized,
    save_unconverted,
    save_with_trainer,
)

# Other tools write configs of their own, with one rank, one alpha and a list of names.
_ONLY_PEFT = frozenset({Axis.TOOL})
_WHOLE_NAMES = frozenset({Axis.TOOL, Axis.PLACE})  # full names fit one path of the layers
_PLAIN: frozenset[Axis] = frozenset()


def _trained(
    name: str, build: Build, says: str = EQUAL, excludes: frozenset[Axis] = _ONLY_PEFT
) -> Feature:
    return Feature(name, Axis.TRAINING, build, says, excludes)


def _options(
    name: str, says: str = EQUAL, *, excludes: frozenset[Axis] = _ONLY_PEFT, **options: Any
) -> Feature:
    """Feature with an adapter that LoraConfig(**options) makes."""
    return _trained(name, lambda draft: save(draft, **options), says, excludes)


def plain(draft: Draft) -> None:
    """Train every linear; once for each base model and rank."""
    kept = draft.base.folder.parent / f"plain-{draft.rank}"
    if not kept.exists():
        save(draft, target_modules=EVERY_LINEAR)
        shutil.copytree(draft.folder, kept)
    else:
        shutil.copytree(kept, draft.folder)


def _patterned(draft: Draft) -> dict[str, int]:
    """Give every module a rank by pattern, none of which is the draft's."""
    return {"q_proj": draft.rank + 1, r"layers\.1\..*v_proj": draft.rank + 2}


TRAINING: tuple[Feature, ...] = (
    # Targets.
    _trained("every linear by name", plain, excludes=_PLAIN),
    _options("q and v", target_modules=["q_proj", "v_proj"], excludes=_PLAIN),
    _options(
        "the MLP alone", target_modules=["gate_proj", "up_proj", "down_proj"], excludes=_PLAIN
    ),
    _options("PEFT's own targets"),
    _options("all-linear", target_modules="all-linear"),
    _options("targets as an expression", target_modules=r".*\.(?:[qk]|up|down)_proj"),
    _options(
        "targets as whole names",
        target_modules=["model.layers.0.mlp.down_proj", "1.self_attn.q_proj"],
        excludes=_WHOLE_NAMES,
    ),
    _options(
        "modules excluded by name",
        target_modules="all-linear",
        exclude_modules=["k_proj", "0.mlp.up_proj"],
    ),
    _options(
        "modules excluded by an expression",
        target_modules="all-linear",
        exclude_modules=r".*\.0\.mlp\..*",
    ),
    _options(
        "some layers",
        target_modules=EVERY_LINEAR,
        layers_to_transform=[0, 2],
        excludes=_WHOLE_NAMES,
    ),
    _options(
        "one layer under its pattern",
        target_modules=EVERY_LINEAR,
        layers_to_transform=1,
        layers_pattern="layers",
        excludes=_WHOLE_NAMES,
    ),
    _options(
        "layers under one of several patterns",
        target_modules=["q_proj", "down_proj"],
        layers_to_transform=[1, 2],
        layers_pattern=["blocks", "layers"],
        excludes=_WHOLE_NAMES,
    ),
    _options(
        "whole names beside chosen layers",
        target_modules=["model.layers.0.self_attn.q_proj", "v_proj"],
        layers_to_transform=[1],
        excludes=_WHOLE_NAMES,
    ),
    # Ranks and scalings.
    _trained(
        "rank_pattern",
        lambda draft: save(draft, target_modules=EVERY_LINEAR, rank_pattern=_patterned(draft)),
    ),
    _options(
        "rank_pattern from the start of the name",
        target_modules=["q_proj"],
        rank_pattern={"^model.layers.0.self_attn.q_proj": 3},
        excludes=_WHOLE_NAMES,
    ),
    _options(
        "alpha_pattern",
        target_modules=EVERY_LINEAR,
        alpha_pattern={"k_proj": 5, r"layers\.0\.mlp\.up_proj": 40},
    ),
    _options(
        "patterns that overlap",
        target_modules=["q_proj", "v_proj"],
        rank_pattern={".*v_proj": 5, "[qv]_proj": 2, "v_proj": 7},
        alpha_pattern={"[qv]_proj": 9, "v_proj": 1},
    ),
    # PEFT sorts the keys that it saves, and on reading takes the first key that matches.
    _options(
        "alphas whose order PEFT loses",
        target_modules=["q_proj", "v_proj"],
        alpha_pattern={"v_proj": 3, "[qv]_proj": 9},
    ),
    _options(
        "ranks whose order PEFT loses",
        "the weights have rank 5 and the config says 2",
        target_modules=["q_proj", "v_proj"],
        rank_pattern={"v_proj": 5, "[qv]_proj": 2},
    ),
    _options("rsLoRA", target_modules=EVERY_LINEAR, use_rslora=True),
    _trained(
        "rsLoRA with a rank_pattern",
        lambda draft: save(
            draft, target_modules=EVERY_LINEAR, rank_pattern=_patterned(draft), use_rslora=True
        ),
    ),
    _options("a fraction as alpha", target_modules=["q_proj", "o_proj"], lora_alpha=4.5),
    _options("a negative alpha", target_modules=["q_proj", "o_proj"], lora_alpha=-8),
    # Initializations.
    _options("gaussian", target_modules=EVERY_LINEAR, init_lora_weights="gaussian"),
    _options("Gaussian", target_modules=EVERY_LINEAR, init_lora_weights="Gaussian"),
    _options("B random at once", target_modules=EVERY_LINEAR, init_lora_weights=False),
    _trained(
        "orthogonal",
        lambda draft: save(
            draft,
            r=draft.rank + draft.rank % 2,
            target_modules=EVERY_LINEAR,
            init_lora_weights="orthogonal",
        ),
    ),
    _options("MiCA", target_modules=EVERY_LINEAR, init_lora_weights="mica"),
    _trained("EVA", save_eva, excludes=_WHOLE_NAMES),
    _trained("PiSSA, converted", lambda draft: save_converted(draft, "pissa")),
    _trained("PiSSA by iterations, converted", lambda d: save_converted(d, "pissa_niter_4")),
    _trained("OLoRA, converted", lambda draft: save_converted(draft, "olora")),
    # Written by hiyouga/LLaMA-Factory b230bbb, src/llamafactory/train/callbacks.py: its
    # pissa_backup,
    # which cannot be told from a plain LoRA.
    _trained("PiSSA that calls itself plain", save_disguised),
    _trained(
        "OLoRA with patterns, converted",
        lambda draft: save_converted(
            draft, "olora", rank_pattern={"q_proj": 3}, alpha_pattern={"q_proj": 5}
        ),
    ),
    _trained(
        "PiSSA with rsLoRA, converted",
        lambda draft: save_converted(draft, "pissa", use_rslora=True),
    ),
    _trained(
        "CorDA, converted",
        lambda draft: save_converted(draft, "corda", corda_config=CordaConfig()),
    ),
    _trained(
        "LoRA-GA, converted",
        lambda draft: save_converted(draft, "lora_ga", lora_ga_config=LoraGAConfig()),
    ),
    # No effect on the served result.
    _options("dropout", target_modules=["v_proj"], lora_dropout=0.1),
    _options("weight tying ensured", target_modules=["v_proj"], ensure_weight_tying=True),
    _options(
        "offloaded while training",
        target_modules=["v_proj"],
        runtime_config=peft.LoraRuntimeConfig(ephemeral_gpu_offload=True),
    ),
    _options("QA-LoRA's group size", target_modules=["v_proj"], qalora_group_size=32),
    _options("Megatron's core", target_modules=["v_proj"], megatron_core="megatron.core.next"),
    _options("bias of linears that have none", target_modules=["o_proj"], bias="lora_only"),
    _options("VeLoRA", target_modules=["q_proj"], velora_config=peft.VeloraConfig(num_groups=4)),
    _options("MonteCLoRA", target_modules=["q_proj"], monteclora_config=peft.MontecloraConfig()),
    _options("a revision", target_modules=["v_proj"], revision="main"),
    _options("bare parameters", target_modules=["v_proj"], target_parameters=["q_proj.weight"]),
    _trained("a checkpoint of transformers' Trainer", save_with_trainer),
    _trained("two adapters concatenated", lambda draft: save_combined(draft, "cat")),
    _trained("two adapters added", lambda draft: save_combined(draft, "linear")),
    _trained("two adapters through an SVD", lambda draft: save_combined(draft, "svd")),
    # Vectors beside A and B.
    _options("DoRA", target_modules=["q_proj", "down_proj"], use_dora=True),
    _options(
        "DoRA with rsLoRA and patterns",
        target_modules=["k_proj", "up_proj"],
        use_dora=True,
        use_rslora=True,
        rank_pattern={"up_proj": 5},
        alpha_pattern={"k_proj": 9},
    ),
    _options("DoRA with biases", target_modules=["v_proj"], use_dora=True, bias="all"),
    _options("bias all", target_modules=["q_proj"], bias="all"),
    _options("bias lora_only", target_modules=["q_proj", "o_proj"], bias="lora_only"),
    _options("a bias of B", target_modules=["q_proj", "gate_proj"], lora_bias=True),
    # Not served.
    _trained("a bias that the base model lacks", save_biased, "the base model has none there"),
    _options(
        "DoRA on lm_head",
        "lm_head cannot have DoRA",
        target_modules=["q_proj", "lm_head"],
        use_dora=True,
    ),
    _options(
        "DoRA on embed_tokens",
        "embed_tokens cannot have DoRA",
        target_modules=["embed_tokens"],
        use_dora=True,
    ),
    _options("lm_head saved whole", target_modules=["q_proj"], modules_to_save=["lm_head"]),
    _options(
        "embed_tokens saved whole", target_modules=["q_proj"], modules_to_save=["embed_tokens"]
    ),
    _options("norms saved whole", "whole modules", modules_to_save=["input_layernorm"]),
    _options("LoRA on lm_head", target_modules=["q_proj", "lm_head"]),
    _options("LoRA on embed_tokens", target_modules=["q_proj", "embed_tokens"]),
    _options("trained tokens", trainable_token_indices=[5, 250]),
    _options(
        "trained tokens by module",
        target_modules=["q_proj"],
        trainable_token_indices={"embed_tokens": [7]},
    ),
    # Activated LoRA, invoked in the middle of the prompt.
    _options("activated LoRA", target_modules=EVERY_LINEAR, alora_invocation_tokens=[130, 77]),
    _options(
        "activated LoRA with a bias of B",
        target_modules=["k_proj", "down_proj"],
        lora_bias=True,
        alora_invocation_tokens=[31],
    ),
    _options("activated LoRA on lm_head", target_modules=["lm_head"], alora_invocation_tokens=[9]),
    _options("an empty invocation", target_modules=["v_proj"], alora_invocation_tokens=[]),
    _trained("tokens added", save_resized, "set LORIKEET_MAX_ADDED_TOKENS"),
    _options("layers replicated", "another base model", layer_replication=[[0, 2], [1, 3]]),
    _options(
        "trained tokens of an activated LoRA",
        "embed_tokens cannot be trained by activated LoRA",
        target_modules=["q_proj"],
        alora_invocation_tokens=[5],
        trainable_token_indices=[5, 250],
    ),
    *(
        _trained(
            f"{name}, not converted",
            lambda d, i=init, o=options: save_unconverted(d, i, **o),
            "may change the base model",
        )
        for name, init, options in (
            ("PiSSA", "pissa", {}),
            ("OLoRA", "olora", {}),
            ("CorDA", "corda", {"corda_config": CordaConfig()}),
            ("LoRA-GA", "lora_ga", {"lora_ga_config": LoraGAConfig()}),
        )
    ),
)
