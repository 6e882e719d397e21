"""Adapters of Gemma 4, Nemotron 3, Granite 4's hybrids and latent attention, by trainers' forms.

PEFT saves the adapters; builders of Unsloth's and MLX's forms name the version and file followed.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors.torch import save_file

from lorikeet_engine.adapter_format import MLX_WEIGHTS_FILE, WEIGHTS_FILE
from tests.corpus.cases import RANKS, Case
from tests.corpus.draft import Draft, Tensors
from tests.corpus.features import EQUAL, Axis, Build, Feature
from tests.corpus.names import PLACE, WRAPPING
from tests.corpus.peft_training import EVERY_LINEAR, save
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


def _peft(name: str, says: str = EQUAL, **options: Any) -> Feature:
    """Feature with an adapter that LoraConfig(**options) makes."""
    return Feature(name, Axis.TRAINING, lambda draft: save(draft, **options), says)


def _tool(name: str, build: Build, says: str = EQUAL) -> Feature:
    return Feature(name, Axis.TOOL, build, says)


def _moved(change: Callable[[Tensors], Tensors]) -> Build:
    return lambda draft: draft.edit_weights(change)


def _renamed(old: str, new: str) -> Build:
    return lambda draft: draft.rename(lambda name: name.replace(old, new))


def _then(*builds: Build) -> Build:
    def build(draft: Draft) -> None:
        for each in builds:
            each(draft)

    return build


def _without(part: str) -> Build:
    """Leave out the tensors of a part of the names, which the config still targets."""
    return _moved(lambda tensors: {n: t for n, t in tensors.items() if part not in n})


def _names(draft: Draft) -> list[str]:
    """Return the last names of the modules with weights, sorted."""
    modules = (name.partition(".lora_")[0] for name in draft.tensors())
    return sorted({module.rpartition(".")[2] for module in modules})


def _unsloth(draft: Draft) -> None:
    """Target by an expression, in a vision-language model.

    unslothai/unsloth-zoo ce232d6, unsloth_zoo/peft_utils.py, get_peft_regex.
    """
    _renamed("model.layers.", "model.language_model.layers.")(draft)
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
    _renamed("model.layers.", "model.language_model.layers.")(draft)
    _renamed("model.per_layer_", "model.language_model.per_layer_")(draft)
    block = "encoder.layers.0.self_attn.q_proj.linear"
    others = [f"vision_tower.{block}", "audio_tower.layers.0.self_attn.q_proj.linear"]
    others.append("embed_vision.embedding_projection")
    modules = [f"{_PREFIX}model.{other}.lora_{side}.weight" for other in others for side in "AB"]
    _moved(lambda tensors: tensors | {name: torch.ones(4, 4) for name in modules})(draft)


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
    _renamed("model.layers.", "backbone.layers.")(draft)
    _renamed("model.embeddings.", "backbone.embeddings.")(draft)


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


_EVERY = _peft("every linear by name", target_modules=EVERY_LINEAR)
_ALL_LINEAR = _peft("all-linear", target_modules="all-linear")
_SOME_ATTENTION = _peft("attention", target_modules=_ATTENTION)
_OF_LATENTS = _peft("latents", target_modules=_LATENTS)
_MIXERS = _peft("mixers", target_modules=[*_ATTENTION, "in_proj"])

# Trained by PEFT itself.
TRAINED: tuple[tuple[Feature, tuple[str, ...]], ...] = (
    (_ALL_LINEAR, (*GEMMA, *HYBRIDS[2:], *LATENT)),
    (
        _peft("all-linear but out_proj", target_modules="all-linear", exclude_modules=["out_proj"]),
        NEMOTRON,  # PEFT trains no out_proj of theirs
    ),
    (_peft("PEFT's own targets"), NEMOTRON),
    (_SOME_ATTENTION, (*GEMMA, *HYBRIDS)),
    (_EVERY, GEMMA),
    (_peft("queries and values", target_modules=["q_proj", "v_proj"]), (*GEMMA, *HYBRIDS)),
    (_peft("values alone", target_modules=["v_proj"]), GEMMA),
    (_peft("keys of one layer", target_modules=["k_proj"], layers_to_transform=[0]), GEMMA),
    (_peft("outputs of the last layer", target_modules=r".*\.4\.self_attn\.o_proj"), (SHARING,)),
    (_peft("MLP", target_modules=_MLP), (DENSE, MIXED, SHARING)),
    (_peft("inputs of layers", target_modules=_INPUTS), (SHARING,)),
    (_peft("inputs of layers, and others", target_modules=[*_INPUTS, *EVERY_LINEAR]), (SHARING,)),
    (_peft("the inputs' projection alone", target_modules=_INPUTS[2:]), (SHARING,)),
    (_peft("inputs of one layer", target_modules=_INPUTS, layers_to_transform=[1]), (SHARING,)),
    (
        _peft(
            "inputs of layers as parameters",
            target_modules=["q_proj"],
            target_parameters=[f"{name}.weight" for name in _INPUTS],
        ),
        (SHARING,),
    ),
    (
        _peft(
            "inputs of layers by an expression",
            target_modules=r"model\.(layers\.\d\.)?per_layer_\w+(gate|projection)",
            rank_pattern={"per_layer_model_projection": 3},
        ),
        (SHARING,),
    ),
    (
        _peft(
            "gates of inputs left out",
            target_modules="all-linear",
            exclude_modules=_INPUTS,
        ),
        (SHARING,),
    ),
    (
        _peft(
            "inputs of some layers",
            target_modules=_INPUTS[:2],
            layers_to_transform=[1, 4],
            rank_pattern={r"layers\.4\.per_layer_projection": 5},
        ),
        (SHARING,),
    ),
    (
        _peft("layers' embeddings", "embed_tokens", target_modules=["embed_tokens_per_layer"]),
        (SHARING,),
    ),
    (
        _peft(
            "layers' embeddings saved whole",
            "whole modules",
            target_modules=["q_proj"],
            modules_to_save=["embed_tokens_per_layer"],
        ),
        (SHARING,),
    ),
    (_peft("router", target_modules=["q_proj", "proj"]), (MIXED,)),
    (
        _peft(
            "experts",
            target_modules=["o_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        ),
        (MIXED,),
    ),
    (
        _peft("head and embeddings", target_modules=["o_proj", "lm_head", "embed_tokens"]),
        (*GEMMA, GRANITE, *LATENT),
    ),
    (_peft("head", target_modules=["v_proj", "lm_head"]), NEMOTRON),
    (
        _peft("trained tokens", target_modules=["o_proj"], trainable_token_indices=[5, 250]),
        (*GEMMA, GRANITE, *LATENT),
    ),
    (
        _peft(
            "rsLoRA and patterns",
            target_modules=["q_proj", "o_proj", "kv_b_proj", "in_proj"],
            use_rslora=True,
            rank_pattern={"o_proj": 3},
            alpha_pattern={r"layers\.[01]\.": 5},
        ),
        ALL,
    ),
    (_MIXERS, HYBRIDS),
    (_peft("Mamba alone", target_modules=["in_proj"]), HYBRIDS),
    (_peft("MLPs and shared experts", target_modules=["up_proj", "down_proj"]), NEMOTRON),
    (_peft("latent projections", target_modules=["fc1_latent_proj", "fc2_latent_proj"]), (SUPER,)),
    (
        _peft(
            "experts of Nemotron",
            target_modules=["q_proj"],
            target_parameters=["experts.up_proj", "experts.down_proj"],
        ),
        NEMOTRON,
    ),
    (
        _peft(
            "a convolution's parameter",
            "train its linears alone",
            target_modules=["q_proj"],
            target_parameters=["conv1d.weight"],
        ),
        HYBRIDS[2:],  # PEFT trains none of Nemotron's
    ),
    (_peft("shared MLP", target_modules=["input_linear", "output_linear"]), HYBRIDS[2:]),
    (_OF_LATENTS, LATENT),
    (_peft("kv_b_proj alone", target_modules=["kv_b_proj"]), LATENT),
    (_peft("whole queries", target_modules=["q_proj"]), (WHOLE_QUERIES,)),
    (_peft("latents of queries", target_modules=["q_a_proj", "q_b_proj"]), (FLASH,)),
    (
        _peft(
            "MLPs as parameters, and experts",
            target_modules=["o_proj"],
            target_parameters=[*_OF_LATENT_MLP, "mlp.gate.weight", *BOTH],
        ),
        LATENT,
    ),
    (
        _peft(
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
        (trained, _tool(name, build), families)
        for trained, families in _OF_UNSLOTH
        for name, build in (("Unsloth", _unsloth), ("Unsloth of text", _unsloth_of_text))
    ),
    *((_ALL_LINEAR, _tool("encoders beside it", _encoders), (family,)) for family in GEMMA),
    (_EVERY, _tool("MLX", _mlx), GEMMA),
    (_ALL_LINEAR, _tool("MLX of inputs", _mlx), (SHARING,)),
    (_MIXERS, _tool("NVIDIA's names", _nvidia), NEMOTRON),
    *(
        (_ALL_LINEAR, _tool(f"{part} is lost", _without(part), _LOST), (SHARING,))
        for part in (
            *_INPUTS,
            "layers.4.",
            "3.self_attn.q_proj",
            "2.self_attn.k_proj",
        )
    ),
    *(
        (_MIXERS, _tool(f"{part} is lost", _without(part), _LOST), HYBRIDS)
        for part in ("in_proj", "q_proj")
    ),
    *(
        (_OF_LATENTS, _tool(f"{part} is lost", _without(part), _LOST), LATENT)
        for part in ("kv_b_proj", "kv_a_proj_with_mqa", "layers.1.self_attn.o_proj")
    ),
    (_OF_LATENTS, _tool("queries are lost", _without("self_attn.q_"), _LOST), LATENT),
    *(
        (
            trained,
            _tool("keys of every layer", _of_every_layer, _OTHER_LAYERS),
            (SHARING,),
        )
        for trained in (_EVERY, _ALL_LINEAR, _SOME_ATTENTION)
    ),
    (
        _EVERY,
        _tool(
            "inputs of layers that the base model lacks",
            _moved(
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


def cases() -> Iterator[Case]:
    """Yield one case for each form and base model."""
    table = [((feature,), bases) for feature, bases in TRAINED]
    table += [((trained, form), bases) for trained, form, bases in FORMS]
    number = 0
    for features, bases in table:
        for family in bases:
            yield Case(family, RANKS[number % 5], features, number)
            number += 1


def each_form() -> list[Case]:
    """Return one case for each form and kind of adapter, of one of its base models in turn."""
    forms: dict[tuple[str, ...], list[Case]] = {}
    for case in cases():
        forms.setdefault(tuple(feature.name for feature in case.features), []).append(case)
    return [found[number % len(found)] for number, found in enumerate(forms.values())]
