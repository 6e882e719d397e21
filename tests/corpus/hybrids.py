"""Adapters of hybrids (Qwen 3.5, its mixtures, Qwen3-Next), in each form that trainers save.

Run on tiny bases, in a venv of their own, to see names and configs: PEFT 0.21.2, TRL 1.16.0
(SFTTrainer saves PEFT's files), mlx-lm 0.32.2 with mlx[cpu] 0.32.4, and tinker-cookbook 0.6.1's
build_lora_adapter. Builders of other trainers' forms name the version and file followed.
"""

from itertools import product

import torch
from safetensors.torch import save_file

from lorikeet_engine.adapter_format import MLX_WEIGHTS_FILE, WEIGHTS_FILE
from tests.corpus.cases import cases_of
from tests.corpus.draft import Draft, Tensors
from tests.corpus.features import Axis, Build, Feature, moved, then, tool
from tests.corpus.names import PLACE, WRAPPING
from tests.corpus.peft_training import EVERY_LINEAR, by_peft, save
from tests.engine.moe_adapters import BOTH

DENSE, MIXED, NEXT = "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"
ALL = (DENSE, MIXED, NEXT)
_PREFIX = "base_model.model."
_QKV = "linear_attn.in_proj_qkv"
_DELTA = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"]
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_SHARED = [f"shared_expert.{name}_proj" for name in ("gate", "up", "down")]


def _plain(draft: Draft) -> None:
    save(draft, target_modules="all-linear")


def _added(shapes: dict[str, tuple[int, ...]]) -> Build:
    return moved(lambda t: t | {_PREFIX + name: torch.ones(s) for name, s in shapes.items()})


def _as_three(draft: Draft) -> None:
    """Train in_proj_qkv as PEFT can compute q, k and v apart: thrice the rank, B block-diagonal."""
    rank = 3 * draft.rank
    options = {"rank_pattern": {_QKV: rank}, "alpha_pattern": {_QKV: 2 * rank}}
    save(draft, target_modules=[*_ATTENTION, *_DELTA, "out_proj", "lm_head"], **options)
    net = draft.base.shape.recurrent
    assert net is not None
    keys = net.key_heads * net.key_dim
    place = torch.arange(2 * keys + net.value_heads * net.value_dim).div(keys).long().clamp(max=2)
    mask = (place[:, None] == torch.arange(rank) // draft.rank).float()
    draft.edit_weights(
        lambda tensors: {
            n: t * mask if f"{_QKV}.lora_B" in n else t
            for n, t in tensors.items()
            if "base_layer" not in n
        }
    )


def _apart(draft: Draft, name: str, tensor: torch.Tensor) -> Tensors:
    """Return the tensors of q, k and v that Tinker has in place of one of in_proj_qkv's."""
    net, rank = draft.base.shape.recurrent, draft.rank
    assert net is not None
    keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
    parts = tensor.split(rank if "lora_A" in name else [keys, keys, values])
    if "lora_B" in name:
        parts = tuple(part[:, i * rank : (i + 1) * rank] for i, part in enumerate(parts))
    whole = "in_proj_qkv."
    return {name.replace(whole, f"in_proj_{p}."): t for p, t in zip("qkv", parts, strict=True)}


def _tinker(draft: Draft) -> None:
    """Name q, k and v of in_proj_qkv apart, in a vision-language model, and target last names.

    tinker-cookbook 0.6.1, weights/_adapter.py and weights/_merge_qwen3_5.py. It has no other form
    for in_proj_qkvz and in_proj_ba than for other linears.
    """

    def split(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            found |= _apart(draft, name, tensor) if _QKV in name else {name: tensor}
        return {
            n.replace("model.layers.", "model.language_model.layers."): t for n, t in found.items()
        }

    draft.edit_weights(split)
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name in draft.tensors()}
    draft.edit_config(target_modules=sorted(names), rank_pattern={}, alpha_pattern={})


def _without(part: str, *, target: bool = False) -> Build:
    """Leave out the tensors of a part of the names.

    target: whether the config still targets it.
    """

    def build(draft: Draft) -> None:
        draft.edit_weights(lambda tensors: {n: t for n, t in tensors.items() if part not in n})
        if not target:
            names = draft.config()["target_modules"]
            draft.edit_config(target_modules=[name for name in names if name != part])

    return build


def _experts(layers: int, path: str = "mlp.experts") -> Build:
    """Add matrices of each expert.

    layers: number of first layers.
    path: path of the experts in a layer.
    """

    def build(draft: Draft) -> None:
        rank, shapes = draft.rank, dict[str, tuple[int, ...]]()
        for layer, number in product(range(layers), range(draft.base.shape.experts)):
            for name, d_in, d_out in (("gate", 64, 40), ("up", 64, 40), ("down", 40, 64)):
                module = f"model.layers.{layer}.{path}.{number}.{name}_proj"
                shapes |= {
                    f"{module}.lora_A.weight": (rank, d_in),
                    f"{module}.lora_B.weight": (d_out, rank),
                }
        _added(shapes)(draft)

    return build


def _tinker_tied(draft: Draft) -> None:
    """Name the unembedding's matrices as the embeddings', for a base model that ties both.

    tinker-cookbook 0.6.1, weights/_merge_qwen3_5.py, build_qwen3_5_name_remaps.
    """
    _tinker(draft)
    draft.rename(lambda name: name.replace("lm_head.", "model.language_model.embed_tokens."))
    names = draft.config()["target_modules"]
    draft.edit_config(target_modules=[n.replace("lm_head", "embed_tokens") for n in names])


def _megatron(draft: Draft) -> None:
    """Share A among the projections that Megatron fuses to one in_proj, or to one linear_qkv.

    NVIDIA-NeMo/Megatron-Bridge 067f987, src/megatron/bridge/models/conversion/peft_bridge.py, which
    splits in_proj for Qwen 3.5.
    """

    def first(name: str) -> str:
        for part in ("in_proj_z", "in_proj_b", "in_proj_a"):
            name = name.replace(f"{part}.", "in_proj_qkv.")
        for part in ("k_proj", "v_proj"):
            name = name.replace(f"self_attn.{part}.", "self_attn.q_proj.")
        return name

    draft.edit_both(lambda t: {n: t[first(n)] if "lora_A" in n else v for n, v in t.items()})
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name in draft.tensors()}
    draft.edit_config(target_modules=sorted(names), use_dora=False, use_rslora=False)


def _megatron_next(draft: Draft) -> None:
    """Name Megatron's whole fused in_proj after the first of its two matrices in the checkpoint.

    Source: that of _megatron, which for Qwen3-Next does not split in_proj.
    """

    def fuse(tensors: Tensors) -> Tensors:
        return {
            n: torch.cat([t, tensors[n.replace("qkvz", "ba")]]) if "in_proj_qkvz.lora_B" in n else t
            for n, t in tensors.items()
            if "in_proj_ba" not in n
        }

    draft.edit_weights(fuse)
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name in draft.tensors()}
    draft.edit_config(target_modules=sorted(names))


def _mlx(draft: Draft) -> None:
    """Write the file and config of mlx_lm.lora 0.32.2, tuner/lora.py, as its run shows them."""
    config, next_family = draft.config(), draft.base.shape.family == NEXT
    before = "" if next_family else "language_model."
    tensors: Tensors = {}
    for name, tensor in draft.tensors().items():
        module, _, side = name.removeprefix(_PREFIX).partition(".lora_")
        tensors[f"{before}{module}.lora_{side[0].lower()}"] = tensor.T.contiguous()
    (draft.folder / WEIGHTS_FILE).unlink()
    save_file(tensors, draft.folder / MLX_WEIGHTS_FILE)
    lora = {"rank": config["r"], "scale": config["lora_alpha"] / config["r"], "dropout": 0.0}
    name = config["base_model_name_or_path"]
    draft.write_config({"fine_tune_type": "lora", "lora_parameters": lora, "model": name})


def _full_names(draft: Draft) -> None:
    """Target each module by its full name.

    NVIDIA-NeMo/Automodel; TRL's folders of small models have such lists, too, since PEFT does.
    """
    names = {n.removeprefix(_PREFIX).partition(".lora_")[0] for n in draft.tensors()}
    draft.edit_config(target_modules=sorted(names))


def _prime(draft: Draft) -> None:
    """Write the config of prime-rl.

    PrimeIntellect-ai/prime-rl 559b447, src/prime_rl/trainer/lora.py.
    """
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name in draft.tensors()}
    kept = {key: draft.config()[key] for key in ("r", "lora_alpha", "base_model_name_or_path")}
    common = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "lora_dropout": 0.0, "bias": "none"}
    draft.write_config({**common, **kept, "target_modules": sorted(names), "modules_to_save": None})


def _unsloth(draft: Draft) -> None:
    """Target by an expression, which matches delta nets in a vision-language model alone.

    unslothai/unsloth-zoo ce232d6, unsloth_zoo/peft_utils.py, get_peft_regex.
    """
    draft.rename(_in_vision_language)
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name in draft.tensors()}
    linears = f"(?:{'|'.join(sorted(names))})"
    blocks = "self_attn|attention|attn|mixer|mlp|feed_forward|ffn|dense|mixer"
    draft.edit_config(
        target_modules=rf"(?:.*?(?:vision|image|visual|patch|language|text).*?(?:{blocks}).*?"
        rf"{linears})|(?:\bmodel\.layers\.[\d]{{1,}}\.(?:{blocks})\.(?:{linears}))"
    )


def _in_vision_language(name: str) -> str:
    return name.replace("model.layers.", "model.language_model.layers.")


def _vision(draft: Draft) -> None:
    """Adapt the vision tower, too, as PEFT's all-linear does in a vision-language model."""
    draft.rename(_in_vision_language)
    block = "model.visual.blocks.0.attn.qkv"
    _added({f"{block}.lora_A.weight": (4, 8), f"{block}.lora_B.weight": (24, 4)})(draft)


def _vision_alone(draft: Draft) -> None:
    _vision(draft)
    draft.edit_weights(lambda tensors: {n: t for n, t in tensors.items() if ".visual." in n})


_NET = "model.layers.0.linear_attn"
_DRAFT_HEAD = {f"mtp.layers.0.self_attn.q_proj.lora_{side}.weight": (4, 64) for side in "AB"}
_NO_LINEAR = "of a delta net or Mamba 2 cannot be adapted; train its linears alone"
_QKV_APART = Feature("q, k and v apart", Axis.TRAINING, _as_three)
_PLAIN = Feature("all-linear", Axis.TRAINING, _plain)
_EVERY_LINEAR = by_peft("every linear by name", target_modules=EVERY_LINEAR)
_ALONE = Feature(
    "attention and delta nets",
    Axis.TRAINING,
    lambda d: save(d, target_modules=[*_ATTENTION, *_DELTA, "out_proj"]),
)

# Trained by PEFT itself.
TRAINED: tuple[tuple[Feature, tuple[str, ...]], ...] = (
    (_PLAIN, ALL),
    (_ALONE, ALL),
    (by_peft("attention", target_modules=_ATTENTION), ALL),
    (by_peft("delta nets by an expression", target_modules=r".*\.linear_attn\.\w+_proj\w*"), ALL),
    (
        by_peft(
            "gates of delta nets left out",
            target_modules="all-linear",
            exclude_modules=["in_proj_a", "in_proj_b", "in_proj_ba"],
        ),
        ALL,
    ),
    (
        by_peft(
            "rsLoRA and patterns",
            target_modules=[*_DELTA, "q_proj"],
            use_rslora=True,
            rank_pattern={"in_proj_z|in_proj_ba": 3},
            alpha_pattern={"linear_attn.*": 5},
        ),
        ALL,
    ),
    (by_peft("one layer", target_modules=[*_DELTA, "out_proj"], layers_to_transform=[0]), ALL),
    (by_peft("z without qkv", target_modules=["in_proj_z"]), (DENSE, MIXED)),
    (
        by_peft(
            "bare parameters", target_modules=["k_proj"], target_parameters=["out_proj.weight"]
        ),
        ALL,
    ),
    (by_peft("head and embeddings", target_modules=["out_proj", "lm_head", "embed_tokens"]), ALL),
    (by_peft("trained tokens", target_modules=["out_proj"], trainable_token_indices=[5, 250]), ALL),
    (by_peft("MLP", target_modules=["gate_proj", "up_proj", "down_proj"]), (DENSE,)),
    (by_peft("shared expert", target_modules=[*_SHARED, "shared_expert_gate"]), (MIXED, NEXT)),
    (_EVERY_LINEAR, (MIXED, NEXT)),
    (
        by_peft(
            "every linear by name, and experts",
            target_modules=EVERY_LINEAR,
            target_parameters=BOTH,
        ),
        (MIXED,),
    ),
    (by_peft("experts", target_modules=["o_proj"], target_parameters=BOTH), (MIXED, NEXT)),
    (by_peft("DoRA", target_modules=["in_proj_z", "q_proj", "up_proj"], use_dora=True), (DENSE,)),
    (by_peft("a convolution's LoRA", _NO_LINEAR, target_modules=["conv1d"], r=128), (DENSE,)),
    (
        by_peft(
            "a convolution's parameter",
            _NO_LINEAR,
            target_modules=["q_proj"],
            target_parameters=["linear_attn.conv1d.weight"],
        ),
        ALL,
    ),
    (
        by_peft(
            "convolutions saved whole",
            "whole modules",
            target_modules=["q_proj"],
            modules_to_save=["conv1d"],
        ),
        ALL,
    ),
    (
        by_peft(
            "norms saved whole",
            "whole modules",
            target_modules=["q_proj"],
            modules_to_save=["norm"],
        ),
        ALL,
    ),
    (
        by_peft(
            "delta nets saved whole",
            "whole modules",
            target_modules=["q_proj"],
            modules_to_save=["linear_attn"],
        ),
        ALL,
    ),
)
# the second where attention alone is left, which is all that a Granite 4 needs
_LOST = "no weight is for it|that have no weights"
_TINKER_PART = "no weight is for it|train all three"
# Forms of other trainers, each of an adapter that PEFT has saved.
_CHOSEN = {
    "a vision model's language model",
    "an older vision model's language model",
    "of torch.compile, each layer",
    "of FSDP",
    "with the name default",
}
FORMS: tuple[tuple[Feature, Feature, tuple[str, ...]], ...] = (
    *((_ALONE, each, ALL) for each in (*PLACE, *WRAPPING) if each.name in _CHOSEN),
    (_ALONE, tool("Unsloth", _unsloth), ALL),
    (_EVERY_LINEAR, tool("Unsloth's every linear", _unsloth), (MIXED,)),
    *(
        (_EVERY_LINEAR, tool(f"{part} is lost", _without(part, target=True), _LOST), (MIXED,))
        for part in ("shared_expert", "self_attn", "shared_expert.up_proj", "layers.0.")
    ),
    (
        _EVERY_LINEAR,
        tool(
            "experts are lost",
            lambda draft: draft.edit_config(target_modules=[*EVERY_LINEAR, "experts"]),
            _LOST,
        ),
        (MIXED,),
    ),
    (_EVERY_LINEAR, tool("experts of one layer are lost", _experts(1), _LOST), (MIXED,)),
    (
        _EVERY_LINEAR,
        tool("experts under another name", _experts(2, "mlp.routed_experts"), "cannot be adapted"),
        (MIXED,),
    ),
    (
        _EVERY_LINEAR,
        tool(
            "experts of full names are lost",
            then(_experts(2), _full_names, _without("mlp.experts.", target=True)),
            _LOST,
        ),
        (MIXED,),
    ),
    # Trainers of each expert's linears target `experts` or full names (docs/adapters.md). Names of
    # linears alone select the shared expert's in PEFT, and what remains is what PEFT would compute.
    (
        _EVERY_LINEAR,
        tool(
            "experts that no target names are lost",
            then(_experts(2), _without("mlp.experts.", target=True)),
        ),
        (MIXED,),
    ),
    (_EVERY_LINEAR, tool("Megatron-Bridge without experts", _megatron), (MIXED,)),
    (_ALONE, tool("the vision tower beside it", _vision), ALL),
    (
        _ALONE,
        tool("the vision tower alone", _vision_alone, "the vision part of the base model alone"),
        (DENSE,),
    ),
    (_PLAIN, tool("full names", _full_names), (DENSE,)),
    (_ALONE, tool("full names of two kinds of layers", _full_names), (MIXED, NEXT)),
    (_ALONE, tool("prime-rl", _prime), ALL),
    (_ALONE, tool("MLX", _mlx), ALL),
    (_ALONE, tool("Megatron-Bridge", _megatron), (DENSE, MIXED)),
    (
        _ALONE,
        tool(
            "Megatron-Bridge's whole in_proj", _megatron_next, "was trained for another base model"
        ),
        (NEXT,),
    ),
    (_QKV_APART, tool("Tinker", _tinker), (DENSE, MIXED)),
    (
        _QKV_APART,
        tool("Tinker without k", then(_tinker, _without("in_proj_k")), _TINKER_PART),
        (DENSE,),
    ),
    (
        _QKV_APART,
        tool("Tinker's k is lost", then(_tinker, _without("in_proj_k", target=True)), _TINKER_PART),
        (DENSE, MIXED),
    ),
    (
        _QKV_APART,
        tool(
            "Tinker's q, k and v are lost",
            then(_tinker, *(_without(f"in_proj_{p}", target=True) for p in "qkv")),
            "no weight is for it",
        ),
        (DENSE,),
    ),
    (
        _QKV_APART,
        tool("Tinker of tied embeddings", _tinker_tied, "has the matrices of a head"),
        (DENSE,),
    ),
    (_ALONE, tool("A_log beside it", _added({f"{_NET}.A_log": (4,)}), _NO_LINEAR), ALL),
    (_ALONE, tool("dt_bias beside it", _added({f"{_NET}.dt_bias": (4,)}), _NO_LINEAR), ALL),
    (
        _ALONE,
        tool(
            "the drafting head beside it",
            _added(_DRAFT_HEAD),
            "mtp.layers.* cannot be adapted|are not .rank",
        ),
        (DENSE,),
    ),
)


CASES = tuple(
    cases_of(
        (
            *(((each,), bases) for each, bases in TRAINED),
            *(((each, form), bases) for each, form, bases in FORMS),
        )
    )
)
"""One case for each form and base model."""
