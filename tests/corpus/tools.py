"""Adapters as trainers other than PEFT write them; builders name the version and file followed."""

import shutil
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from lorikeet_engine.adapter_format import (
    CONFIG_FILE,
    MLX_WEIGHTS_FILE,
    WEIGHTS_FILE,
    read_trtllm_pair,
    write_peft_folder,
)
from tests.corpus.bases import HUB_NAME
from tests.corpus.draft import Draft, Tensors
from tests.corpus.features import EQUAL, Axis, Build, Feature

_PREFIX = "base_model.model."
_OWN_NAMES = frozenset({Axis.DAMAGE, Axis.WRAPPING, Axis.PLACE, Axis.CONFIG})
_FUSED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
_TRT_IDS = {"q": 1, "k": 2, "v": 3, "o": 4, "gate": 5, "down": 6, "up": 7}


def _first(name: str) -> str:
    """Return the tensor of the first linear that Megatron fuses."""
    module = name.partition(".lora_")[0].rpartition(".")[2]
    return name.replace(module, _FUSED.get(module, module))


def _targets(tensors: Tensors) -> list[str]:
    """Return the last names of the modules, as exporters derive them from the tensors."""
    return sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors})


def _configured(draft: Draft, **keys: Any) -> None:
    """Write a config of the keys that every config has, and further ones.

    keys: the further keys.
    """
    was = draft.config()
    common = {"peft_type": "LORA", "r": was["r"], "lora_alpha": was["lora_alpha"]}
    draft.write_config({**common, "target_modules": _targets(draft.tensors()), **keys})
    draft.name_base(HUB_NAME)


def _torchtune(draft: Draft) -> None:
    """Write a config of only five keys, as torchtune does.

    pytorch/torchtune 375d71b, training/checkpointing/_checkpointer.py and
    models/convert_weights.py, which restores the usual order of the heads' rows.
    """
    _configured(draft)


def _torchtune_dora(draft: Draft) -> None:
    """Write DoRA's magnitudes, which torchtune's config does not mention (sources: _torchtune)."""
    _torchtune(draft)
    draft.edit_weights(
        lambda tensors: (
            tensors
            | {
                n.replace("lora_B.weight", "lora_magnitude_vector.weight"): t[:, 0]
                for n, t in tensors.items()
                if "lora_B" in n
            }
        )
    )


# Written by converters, which are no trainers.
_CONVERTED: dict[str, Any] = {
    "auto_mapping": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "task_type": "CAUSAL_LM",
}


def _megatron(draft: Draft) -> None:
    """Share A among the linears that Megatron fuses, and name odd ranks whole.

    NVIDIA-NeMo/Megatron-Bridge 355cef4, src/megatron/bridge/models/conversion/peft_bridge.py.
    """

    def share(tensors: Tensors) -> Tensors:
        return {n: tensors.get(_first(n), t) if "lora_A" in n else t for n, t in tensors.items()}

    draft.edit_both(share)
    _configured(
        draft,
        **_CONVERTED,
        use_dora=False,
        use_rslora=False,
    )


def _tinker(draft: Draft) -> None:
    """Write the config with which tinker-cookbook converts an adapter for serving.

    thinking-machines-lab/tinker-cookbook 125e52e, tinker_cookbook/weights/_adapter.py.
    """
    _configured(
        draft,
        **_CONVERTED,
    )


def _tinker_unembedding(draft: Draft) -> None:
    """Adapt lm_head in addition, as Tinker does by default, and save no copy of it.

    Source: that of _tinker.
    """
    rank, shape = draft.config()["r"], draft.base.shape
    vocabulary = draft.base.model().config.vocab_size

    def add(tensors: Tensors) -> Tensors:
        generator = torch.Generator().manual_seed(draft.seed)
        a = torch.randn(rank, shape.hidden, generator=generator) / 8
        b = torch.randn(vocabulary, rank, generator=generator) / 8
        head = f"{_PREFIX}lm_head.lora_"
        return tensors | {f"{head}A.weight": a, f"{head}B.weight": b}

    draft.edit_both(add)
    _tinker(draft)
    shutil.copyfile(draft.folder / CONFIG_FILE, draft.truth / CONFIG_FILE)


def _tinker_tied(draft: Draft) -> None:
    """Name the unembedding's matrices as the embeddings', as for a base model that ties both.

    tinker-cookbook 0.6.1, weights/_merge_utils.py.
    """
    _tinker_unembedding(draft)
    draft.rename(lambda name: name.replace("lm_head.", "model.embed_tokens."))
    leaves = {name.partition(".lora_")[0].rpartition(".")[2] for name in draft.tensors()}
    draft.edit_config(target_modules=sorted(leaves))


def _verl(draft: Draft) -> None:
    """Write the config of verl's merged checkpoints, whose alpha was never set.

    volcengine/verl 682b420, verl/model_merger/base_model_merger.py.
    """
    draft.edit_config(lora_alpha=0, task_type=None, target_modules=_targets(draft.tensors()))


def _unsloth(draft: Draft) -> None:
    """Target modules by an expression of name parts, on a copy of the base model in 4 bits.

    unslothai/unsloth-zoo 03e4279, unsloth_zoo/peft_utils.py.
    """
    targets = "|".join(_targets(draft.tensors()))
    blocks = "self_attn|attention|attn|mlp|feed_forward|ffn|dense"
    draft.edit_config(
        target_modules=rf"(?:.*?(?:language|text).*?(?:{blocks}).*?(?:{targets}).*?)"
        rf"|(?:\bmodel\.layers\.[\d]{{1,}}\.(?:{blocks})\.(?:(?:{targets})))",
        unsloth_version="2026.11.2",
    )
    draft.name_base(f"unsloth/{HUB_NAME.partition('/')[2]}-unsloth-bnb-4bit")


def _alpaca(draft: Draft) -> None:
    """Write only the keys that existed in the days of Alpaca-LoRA and S-LoRA.

    huggingface/peft 26577ab, src/peft/tuners/lora.py.
    """
    _configured(
        draft,
        bias="none",
        enable_lora=None,
        fan_in_fan_out=False,
        inference_mode=True,
        lora_alpha=float(draft.config()["lora_alpha"]),
        lora_dropout=0.05,
        merge_weights=False,
        modules_to_save=None,
        task_type="CAUSAL_LM",
    )


def _mlx(kind: str = "lora", **parameters: Any) -> Build:
    """Write an adapter of MLX.

    ml-explore/mlx-lm ef3c28d, mlx_lm/tuner/lora.py and mlx_lm/lora.py: x · lora_a · lora_b ·
    scale.
    """

    def build(draft: Draft) -> None:
        config = draft.config()
        sides = {"A": "lora_a", "B": "lora_b"}
        tensors = {
            f"{module.removeprefix(_PREFIX)}.{sides[side[0]]}": tensor.T.contiguous()
            for name, tensor in draft.tensors().items()
            for module, _, side in [name.partition(".lora_")]
        }
        (draft.folder / WEIGHTS_FILE).unlink()
        save_file(tensors, draft.folder / MLX_WEIGHTS_FILE)
        scale = config["lora_alpha"] / config["r"]
        lora = {"rank": config["r"], "scale": scale, "dropout": 0.0, **parameters}
        draft.write_config(
            {
                "fine_tune_type": kind,
                "lora_parameters": lora,
                "model": HUB_NAME,
                "num_layers": draft.base.shape.layers,
                "adapter_path": "adapters",
                "batch_size": 4,
                "train": True,
                "grad_checkpoint": False,
            }
        )

    return build


def _tensorrt(draft: Draft) -> None:
    """Write TensorRT-LLM's two tensors, and let `lorikeet convert` read them.

    NVIDIA/TensorRT-LLM 5573a38, examples/hf_lora_convert.py.
    """
    tensors, rows, config = draft.tensors(), [], []
    for name in sorted(name for name in tensors if "lora_A" in name):
        parts = name.split(".")
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        rows.append(torch.cat([a.float().flatten(), b.float().flatten()]).numpy())
        kind = _TRT_IDS[parts[parts.index("lora_A") - 1].removesuffix("_proj")]
        config.append([kind, int(parts[parts.index("layers") + 1]), len(a)])
    width = max(map(len, rows))
    padded = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
    np.save(draft.folder / "model.lora_weights.npy", padded[None])
    np.save(draft.folder / "model.lora_config.npy", np.array(config, np.int32)[None])
    alpha, shape = draft.config()["lora_alpha"], draft.base.shape
    draft.convert = lambda out: write_peft_folder(
        out, *read_trtllm_pair(draft.folder, shape, HUB_NAME, alpha)
    )


def _tool(
    name: str, build: Build, says: str = EQUAL, own: frozenset[Axis] = frozenset()
) -> Feature:
    return Feature(name, Axis.TOOL, build, says, own)


TOOLS: tuple[Feature, ...] = (
    _tool("torchtune", _torchtune),
    _tool("Megatron-Bridge", _megatron),
    _tool("Tinker", _tinker),
    _tool("Unsloth", _unsloth, own=frozenset({Axis.BASE_NAME, Axis.PLACE})),
    _tool("PEFT of 2023", _alpaca),
    _tool("MLX", _mlx(), own=_OWN_NAMES),
    _tool("TensorRT-LLM, converted", _tensorrt, own=_OWN_NAMES | {Axis.BASE_NAME, Axis.FILES}),
    _tool("Tinker with its unembedding", _tinker_unembedding, own=_OWN_NAMES),
    _tool(
        "Tinker with its unembedding, of tied embeddings",
        _tinker_tied,
        "embed_tokens has the matrices of a head.*train_unembed=False",
        _OWN_NAMES,
    ),
    _tool("torchtune's DoRA", _torchtune_dora, "adapter_config.json does not say so", _OWN_NAMES),
    _tool("verl's merger", _verl, "lora_alpha: 0", frozenset({Axis.CONFIG})),
    _tool("MLX's DoRA", _mlx("dora"), "only lora can be served", _OWN_NAMES),
    _tool("MLX's full weights", _mlx("full"), "only lora can be served", _OWN_NAMES),
    _tool("MLX with an alpha", _mlx(alpha=16), "fold it into scale", _OWN_NAMES),
)
