"""Adapters of Gemma 4, Nemotron 3, Granite 4's hybrids and latent attention, by trainers' forms.

PEFT saves the adapters; builders of Unsloth's and MLX's forms name the version and file followed.
"""

import re

import torch
from safetensors.torch import save_file

from lorikeet_engine.adapter_format import MLX_WEIGHTS_FILE, WEIGHTS_FILE
from tests.corpus.cases import cases_of
from tests.corpus.draft import Draft, Tensors
from tests.corpus.features import Build, Feature, moved, renamed, tool
from tests.corpus.names import PLACE, WRAPPING
from tests.corpus.peft_training import EVERY_LINEAR, by_peft
from tests.engine.moe_adapters import BOTH

DENSE, MIXED, SHARING = "gemma4_text", "gemma4_moe_text", "gemma4_e_text"
NANO, SUPER = "nemotron_h", "nemotron_h_latent"
GRANITE, GRANITE_DENSE = "granitemoehybrid", "granite_rope"
FLASH, WHOLE_QUERIES = "glm4_moe_lite", "deepseek_v3_whole_queries"
GEMMA, NEMOTRON = (DENSE, MIXED, SHARING), (NANO, SUPER)
HYBRIDS, LATENT = (*NEMOTRON, GRANITE, GRANITE_DENSE), (FLASH, WHOLE_QUERIES)
ALL = (*GEMMA, *HYBRIDS, *LATENT)
_PREFIX = "base_model.model."
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_INPUTS = ["per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"]
_MLP = ["gate_proj", "up_proj", "down_proj"]
_LATENTS = ["q_a_proj", "q_b_proj", "q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
_OF_LATENT_MLP = [f"{place}.{name}.weight" for place in ("mlp", "shared_experts") for name in _MLP]
_LOST = "no weight is for it|that have no weights"
_OTHER_LAYERS = "to another layer's keys and values and has no [kv]_proj"


def _without(part: str) -> Build:
    """Leave out the tensors of a part of the names, which the config still targets."""
    return moved(lambda tensors: {n: t for n, t in tensors.items() if part not in n})


def _names(draft: Draft) -> list[str]:
    """Return the last names of the modules with weights, sorted."""
    modules = (name.partition(".lora_")[0] for name in draft.tensors())
    return sorted({module.rpartition(".")[2] for module in modules})


def _unsloth(draft: Draft) -> None:
    """Target by an expression, in a vision-language model.

    unslothai/unsloth-zoo ce232d6, unsloth_zoo/peft_utils.py, get_peft_regex.
    """
    renamed("model.layers.", "model.language_model.layers.")(draft)
    blocks = "self_attn|attention|attn|mixer|mlp|feed_forward|ffn|dense|mixer"
    linears = f"(?:{'|'.join(_names(draft))})"
    draft.edit_config(
        target_modules=rf"(?:.*?(?:vision|image|visual|patch|language|text).*?(?:{blocks}).*?"
        rf"{linears})|(?:\bmodel\.layers\.[\d]{{1,}}\.(?:{blocks})\.(?:{linears}))"
    )


def _unsloth_of_text(draft: Draft) -> None:
    """Target by last names, as Unsloth's notebooks of text alone do."""
    draft.edit_config(target_modules=_names(draft))


def _encoders(draft: Draft) -> None:
    """Adapt the encoders of images and sounds, too, as all-linear does in the whole Gemma 4."""
    draft.edit_config(target_modules="all-linear")
    renamed("model.layers.", "model.language_model.layers.")(draft)
    renamed("model.per_layer_", "model.language_model.per_layer_")(draft)
    block = "encoder.layers.0.self_attn.q_proj.linear"
    others = [f"vision_tower.{block}", "audio_tower.layers.0.self_attn.q_proj.linear"]
    others.append("embed_vision.embedding_projection")
    modules = [f"{_PREFIX}model.{other}.lora_{side}.weight" for other in others for side in "AB"]
    moved(lambda tensors: tensors | {name: torch.ones(4, 4) for name in modules})(draft)


def _of_every_layer(draft: Draft) -> None:
    """Give keys and values to layers that have none, as transformers before 5.6 did.

    Each gets the matrices of the layer that it reads, which has the same widths.
    """
    shape = draft.base.shape
    owners = {f"layers.{n}.": f"layers.{shape.kv_owner(n)}." for n in range(shape.layers)}
    part = re.compile(r"(layers\.\d+\.)self_attn\.([kv]_proj)")

    def change(tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for layer, owner in owners.items():
            of_owner = [n for n in tensors if (match := part.search(n)) and match[1] == owner]
            found |= {name.replace(owner, layer): tensors[name] for name in of_owner}
        return found

    draft.edit_weights(change)


def _nvidia(draft: Draft) -> None:
    """Name layers as NVIDIA's own code of Nemotron does: backbone.layers."""
    renamed("model.layers.", "backbone.layers.")(draft)
    renamed("model.embeddings.", "backbone.embeddings.")(draft)


def _mlx(draft: Draft) -> None:
    """Write the file and config of mlx_lm.lora 0.32.2: tuner/lora.py, models/gemma4_text.py."""
    config, tensors = draft.config(), Tensors()
    for name, tensor in draft.tensors().items():
        module, _, side = name.removeprefix(_PREFIX).partition(".lora_")
        tensors[f"language_model.{module}.lora_{side[0].lower()}"] = tensor.T.contiguous()
    (draft.folder / WEIGHTS_FILE).unlink()
    save_file(tensors, draft.folder / MLX_WEIGHTS_FILE)
    lora = {"rank": config["r"], "scale": config["lora_alpha"] / config["r"], "dropout": 0.0}
    name = config["base_model_name_or_path"]
    draft.write_config({"fine_tune_type": "lora", "lora_parameters": lora, "model": name})


_EVERY = by_peft("every linear by name", target_modules=EVERY_LINEAR)
_ALL_LINEAR = by_peft("all-linear", target_modules="all-linear")
_SOME_ATTENTION = by_peft("attention", target_modules=_ATTENTION)
_OF_LATENTS = by_peft("latents", target_modules=_LATENTS)
_MIXERS = by_peft("mixers", target_modules=[*_ATTENTION, "in_proj"])

# Trained by PEFT itself.
TRAINED: tuple[tuple[Feature, tuple[str, ...]], ...] = (
    (_ALL_LINEAR, (*GEMMA, *HYBRIDS[2:], *LATENT)),
    (
        by_peft(
            "all-linear but out_proj", target_modules="all-linear", exclude_modules=["out_proj"]
        ),
        NEMOTRON,  # PEFT trains no out_proj of theirs
    ),
    (by_peft("PEFT's own targets"), NEMOTRON),
    (_SOME_ATTENTION, (*GEMMA, *HYBRIDS)),
    (_EVERY, GEMMA),
    (by_peft("queries and values", target_modules=["q_proj", "v_proj"]), (*GEMMA, *HYBRIDS)),
    (by_peft("values alone", target_modules=["v_proj"]), GEMMA),
    (by_peft("keys of one layer", target_modules=["k_proj"], layers_to_transform=[0]), GEMMA),
    (by_peft("outputs of the last layer", target_modules=r".*\.4\.self_attn\.o_proj"), (SHARING,)),
    (by_peft("MLP", target_modules=_MLP), (DENSE, MIXED, SHARING)),
    (by_peft("inputs of layers", target_modules=_INPUTS), (SHARING,)),
    (by_peft("inputs of layers, and others", target_modules=[*_INPUTS, *EVERY_LINEAR]), (SHARING,)),
    (by_peft("the inputs' projection alone", target_modules=_INPUTS[2:]), (SHARING,)),
    (by_peft("inputs of one layer", target_modules=_INPUTS, layers_to_transform=[1]), (SHARING,)),
    (
        by_peft(
            "inputs of layers as parameters",
            target_modules=["q_proj"],
            target_parameters=[f"{name}.weight" for name in _INPUTS],
        ),
        (SHARING,),
    ),
    (
        by_peft(
            "inputs of layers by an expression",
            target_modules=r"model\.(layers\.\d\.)?per_layer_\w+(gate|projection)",
            rank_pattern={"per_layer_model_projection": 3},
        ),
        (SHARING,),
    ),
    (
        by_peft(
            "gates of inputs left out",
            target_modules="all-linear",
            exclude_modules=_INPUTS,
        ),
        (SHARING,),
    ),
    (
        by_peft(
            "inputs of some layers",
            target_modules=_INPUTS[:2],
            layers_to_transform=[1, 4],
            rank_pattern={r"layers\.4\.per_layer_projection": 5},
        ),
        (SHARING,),
    ),
    (
        by_peft("layers' embeddings", "embed_tokens", target_modules=["embed_tokens_per_layer"]),
        (SHARING,),
    ),
    (
        by_peft(
            "layers' embeddings saved whole",
            "whole modules",
            target_modules=["q_proj"],
            modules_to_save=["embed_tokens_per_layer"],
        ),
        (SHARING,),
    ),
    (by_peft("router", target_modules=["q_proj", "proj"]), (MIXED,)),
    (
        by_peft(
            "experts",
            target_modules=["o_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        ),
        (MIXED,),
    ),
    (
        by_peft("head and embeddings", target_modules=["o_proj", "lm_head", "embed_tokens"]),
        (*GEMMA, GRANITE, *LATENT),
    ),
    (by_peft("head", target_modules=["v_proj", "lm_head"]), NEMOTRON),
    (
        by_peft("trained tokens", target_modules=["o_proj"], trainable_token_indices=[5, 250]),
        (*GEMMA, GRANITE, *LATENT),
    ),
    (
        by_peft(
            "rsLoRA and patterns",
            target_modules=["q_proj", "o_proj", "kv_b_proj", "in_proj"],
            use_rslora=True,
            rank_pattern={"o_proj": 3},
            alpha_pattern={r"layers\.[01]\.": 5},
        ),
        ALL,
    ),
    (_MIXERS, HYBRIDS),
    (by_peft("Mamba alone", target_modules=["in_proj"]), HYBRIDS),
    (by_peft("MLPs and shared experts", target_modules=["up_proj", "down_proj"]), NEMOTRON),
    (
        by_peft("latent projections", target_modules=["fc1_latent_proj", "fc2_latent_proj"]),
        (SUPER,),
    ),
    (
        by_peft(
            "experts of Nemotron",
            target_modules=["q_proj"],
            target_parameters=["experts.up_proj", "experts.down_proj"],
        ),
        NEMOTRON,
    ),
    (
        by_peft(
            "a convolution's parameter",
            "train its linears alone",
            target_modules=["q_proj"],
            target_parameters=["conv1d.weight"],
        ),
        HYBRIDS[2:],  # PEFT trains none of Nemotron's
    ),
    (by_peft("shared MLP", target_modules=["input_linear", "output_linear"]), HYBRIDS[2:]),
    (_OF_LATENTS, LATENT),
    (by_peft("kv_b_proj alone", target_modules=["kv_b_proj"]), LATENT),
    (by_peft("whole queries", target_modules=["q_proj"]), (WHOLE_QUERIES,)),
    (by_peft("latents of queries", target_modules=["q_a_proj", "q_b_proj"]), (FLASH,)),
    (
        by_peft(
            "MLPs as parameters, and experts",
            target_modules=["o_proj"],
            target_parameters=[*_OF_LATENT_MLP, "mlp.gate.weight", *BOTH],
        ),
        LATENT,
    ),
    (
        by_peft(
            "norms saved whole",
            "whole modules",
            target_modules=["q_proj"],
            modules_to_save=["norm"],
        ),
        (DENSE, NANO),
    ),
)
_CHOSEN = {
    "a vision model's language model",
    "an older vision model's language model",
    "of torch.compile, each layer",
    "of FSDP",
    "with the name default",
}
_OF_FAMILIES = ((_EVERY, GEMMA), (_MIXERS, HYBRIDS), (_OF_LATENTS, LATENT))
# Unsloth's expression knows Nemotron's mixer, and not Granite's mamba.
_OF_UNSLOTH = (
    *((_EVERY, GEMMA), (_MIXERS, NEMOTRON), (_SOME_ATTENTION, HYBRIDS[2:]), (_OF_LATENTS, LATENT)),
)
# Forms of other trainers, each of an adapter that PEFT has saved.
FORMS: tuple[tuple[Feature, Feature, tuple[str, ...]], ...] = (
    *(
        (trained, each, families)
        for trained, families in _OF_FAMILIES
        for each in (*PLACE, *WRAPPING)
        if each.name in _CHOSEN
    ),
    *(
        (trained, tool(name, build), families)
        for trained, families in _OF_UNSLOTH
        for name, build in (("Unsloth", _unsloth), ("Unsloth of text", _unsloth_of_text))
    ),
    *((_ALL_LINEAR, tool("encoders beside it", _encoders), (family,)) for family in GEMMA),
    (_EVERY, tool("MLX", _mlx), GEMMA),
    (_ALL_LINEAR, tool("MLX of inputs", _mlx), (SHARING,)),
    (_MIXERS, tool("NVIDIA's names", _nvidia), NEMOTRON),
    *(
        (_ALL_LINEAR, tool(f"{part} is lost", _without(part), _LOST), (SHARING,))
        for part in (
            *_INPUTS,
            "layers.4.",
            "3.self_attn.q_proj",
            "2.self_attn.k_proj",
        )
    ),
    *(
        (_MIXERS, tool(f"{part} is lost", _without(part), _LOST), HYBRIDS)
        for part in ("in_proj", "q_proj")
    ),
    *(
        (_OF_LATENTS, tool(f"{part} is lost", _without(part), _LOST), LATENT)
        for part in ("kv_b_proj", "kv_a_proj_with_mqa", "layers.1.self_attn.o_proj")
    ),
    (_OF_LATENTS, tool("queries are lost", _without("self_attn.q_"), _LOST), LATENT),
    *(
        (
            trained,
            tool("keys of every layer", _of_every_layer, _OTHER_LAYERS),
            (SHARING,),
        )
        for trained in (_EVERY, _ALL_LINEAR, _SOME_ATTENTION)
    ),
    (
        _EVERY,
        tool(
            "inputs of layers that the base model lacks",
            moved(
                lambda tensors: (
                    tensors
                    | {
                        f"{_PREFIX}model.layers.0.{_INPUTS[0]}.lora_{side}.weight": torch.ones(4, 4)
                        for side in "AB"
                    }
                )
            ),
            "leaves out",
        ),
        GEMMA,
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
