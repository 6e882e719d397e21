"""A vision-language checkpoint is served as its text part, and what cannot be is named at start."""

import json
import shutil

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import BaseShape, decoder_config
from lorikeet_engine.adapter_format.families import (
    FAMILIES,
    TEXT_DECODERS,
    VISION_LANGUAGE,
    LayerKind,
)
from lorikeet_engine.adapter_format.shape import AttentionHeads, RecurrentShape
from lorikeet_engine.errors import AdapterRejected, ModelError
from lorikeet_engine.kernels.fp8 import DTYPE
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.llama import load_model, rehearse_load
from tests.engine.blob_shelf import BlobShelf
from tests.engine.conftest import FAMILIES as FAMILY_CONFIGS
from tests.engine.conftest import GEMMA4_MOE, HYBRID, SIZES, YARN, PagedTokens
from tests.engine.engine_driver import Answers, build, greedy
from tests.engine.models.quantized_checkpoints import (
    CONFIGS,
    INPUT_SCALES,
    SCALES,
    expanded,
    linears,
    scales_of,
)
from tests.engine.models.test_models import Run, assert_equal, prompt_of

PROMPT = prompt_of(40)
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
PATCHES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 2,
}
QWEN3_VISION = {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
QWEN2_VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 2}
PIXTRAL = {**PATCHES, "model_type": "pixtral"}
OTHERWISE_REFUSED = {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
# By the wrapper: what text_config has beside SIZES, and vision_config.
MODELS = {
    "gemma3": (
        {
            "model_type": "gemma3_text",
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 0.5,
            "sliding_window": 24,
            "tie_word_embeddings": True,
        },
        {**PATCHES, "model_type": "siglip_vision_model"},
    ),
    "gemma4": (
        {**GEMMA4_MOE["gemma4_moe_text"], "tie_word_embeddings": False, "pad_token_id": 0},
        {**PATCHES, "model_type": "gemma4_vision", "head_dim": 16},
    ),
    "gemma4_unified": (
        {
            **FAMILY_CONFIGS["gemma4_text"],
            "model_type": "gemma4_unified_text",
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
        {"model_type": "gemma4_unified_vision", "mm_embed_dim": 32, "mm_posemb_size": 8},
    ),
    "internvl": (
        {"model_type": "qwen2"},
        {**PATCHES, "image_size": [8, 8], "patch_size": [4, 4]},
    ),
    "llava": ({"model_type": "mistral", "sliding_window": None}, PIXTRAL),
    "llava_next": (
        {"model_type": "granite", "logits_scaling": 3.0, "residual_multiplier": 0.6},
        {**PATCHES, "model_type": "siglip_vision_model"},
    ),
    "mistral3": (
        {
            "model_type": "ministral3",
            "head_dim": 32,
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.2},
        },
        PIXTRAL,
    ),
    "qwen2_5_vl": ({"rope_parameters": MROPE}, QWEN_VISION),
    "qwen2_vl": ({"rope_parameters": MROPE}, QWEN2_VISION),
    "qwen3_5": (
        {
            **HYBRID["qwen3_5_text"],
            "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
        },
        {**QWEN_VISION, "num_position_embeddings": 16},
    ),
    "qwen3_5_moe": (
        {
            **HYBRID["qwen3_5_moe_text"],
            "rope_parameters": {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
        },
        {**QWEN_VISION, "num_position_embeddings": 16},
    ),
    "qwen3_vl": ({"rope_parameters": MROPE, "head_dim": 16}, QWEN3_VISION),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints as transformers' classes save them."""
    return {name: save(name, tmp_path_factory.mktemp(name)) for name in MODELS}


def save(name, folder):
    text, vision = MODELS[name]
    settings = {"text_config": SIZES | text, "vision_config": vision}
    settings["tie_word_embeddings"] = text.get("tie_word_embeddings", False)
    config = transformers.AutoConfig.for_model(name, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for weight_name, weight in model.named_parameters():
            if "language_model" in weight_name and weight.dim() == 1:
                weight.data.normal_(1.0 if "norm" in weight_name else 0.0, 0.3)
                if "gemma4" in name and "q_norm" in weight_name:
                    weight.data /= len(weight) ** 0.5
    model.save_pretrained(folder)
    return folder


def reference(folder):
    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def logits(folder):
    model = load_model(folder, torch.device("cpu"), torch.float32)
    run = Run(folder, PagedTokens(), model=model)
    run.step({"a": PROMPT[:30]})
    run.step({"a": PROMPT[30:]})
    return run.of("a")


def test_every_known_wrapper_is_tried():
    assert sorted(MODELS) == sorted(VISION_LANGUAGE)


@pytest.mark.parametrize("name", MODELS)
def test_text_is_computed_as_the_whole_model_does(folders, name):
    with torch.inference_mode():
        want = reference(folders[name])(input_ids=torch.tensor([PROMPT])).logits[0]
    assert_equal(logits(folders[name]), want)


@pytest.mark.parametrize("name", MODELS)
def test_the_names_that_tensors_have_on_the_hub_are_known_too(folders, name, tmp_path):
    """All that one writes: within model, within language_model, or as if it stood alone."""
    want = logits(folders[name])
    tensors = load_file(folders[name] / "model.safetensors")
    for place in ("model.language_model.", "language_model.model.", "model."):
        folder = shutil.copytree(folders[name], tmp_path / place)
        save_file(
            {moved(key, place): t for key, t in tensors.items()}, folder / "model.safetensors"
        )
        assert torch.equal(logits(folder), want)


@pytest.mark.parametrize(
    ("wrapper", "kind"),
    [
        ("llava", "dynamic"),
        ("mistral3", "matrices"),
        ("qwen3_5", "blocks"),
        ("qwen3_5_moe", "blocks"),
    ],
)
def test_a_text_part_that_is_stored_in_fp8_is_served_as_if_it_stood_alone(
    folders, tmp_path, wrapper, kind
):
    raw = json.loads((folders[wrapper] / "config.json").read_text())
    raw["quantization_config"] = CONFIGS[kind]
    names, tensors = linears(folders[wrapper])
    for name in [n for n in names if "language_model" in n]:
        scales = scales_of(kind, tensors[name])
        tensors[name] = (tensors[name] / expanded(scales, tensors[name].shape, kind)).to(DTYPE)
        tensors[name.replace("weight", SCALES.get(kind, "weight_scale"))] = scales
        if kind in INPUT_SCALES:
            tensors[name.replace("weight", INPUT_SCALES[kind])] = torch.tensor(0.5)
    alone = {
        moved(name, "model.").removeprefix("language_model."): tensor
        for name, tensor in tensors.items()
        if "language_model" in name or name.startswith("lm_head")
    }
    configs = {"within": raw, "alone": decoder_config(raw)}
    for name, saved in (("within", tensors), ("alone", alone)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(configs[name]))
        save_file(saved, tmp_path / name / "model.safetensors")
    assert torch.equal(logits(tmp_path / "within"), logits(tmp_path / "alone"))


def moved(name, place):
    for part in ("layers.", "embed_tokens.", "norm."):
        for before in ("model.language_model.", "language_model.model.", "model."):
            if name.startswith(before + part):
                return place + name.removeprefix(before)
    return name


def test_the_older_config_of_qwen_vl_which_has_no_text_config_means_the_same(folders, tmp_path):
    want = ModelConfig.from_folder(folders["qwen2_5_vl"])
    raw = json.loads((folders["qwen2_5_vl"] / "config.json").read_text())
    text = raw.pop("text_config") | {"rope_parameters": None, "rope_theta": 10_000.0}
    flat = text | raw | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert ModelConfig.from_folder(tmp_path) == want


@pytest.mark.parametrize("kind", TEXT_DECODERS)
def test_a_key_that_is_left_out_means_what_transformers_says(kind, tmp_path):
    """transformers leaves defaults out of a text_config: LLaVA 1.5's has no sizes."""
    wrapper = kind.removesuffix("_text") if kind.endswith("_text") else "llava"
    own = OTHERWISE_REFUSED if kind.startswith("gemma4") else {}
    raw = {"model_type": wrapper, "text_config": {"model_type": kind, **own}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_folder(tmp_path)
    whole = transformers.AutoConfig.for_model(**raw)
    text = whole.get_text_config()
    text.allow_global_per_layer_attribute_access = True
    heads, kinds = text.num_attention_heads, FAMILIES[TEXT_DECODERS[kind].family].kinds
    assert config.shape == BaseShape(
        family=TEXT_DECODERS[kind].family,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or text.moe_intermediate_size,
        heads=heads,
        kv_heads=text.num_key_value_heads or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        tied=whole.tie_word_embeddings,
        experts=getattr(text, "num_experts", None) or 0,
        shared_intermediate=getattr(text, "shared_expert_intermediate_size", 0),
        kinds=tuple(map(LayerKind, text.layer_types)) if kinds else (),
        recurrent=RecurrentShape(16, 128, 32, 128, 4) if LayerKind.DELTA_NET in kinds else None,
        full=AttentionHeads(4, 512) if LayerKind.WINDOW in kinds else None,
        biased=("qkv",) if kind.startswith("qwen2") else (),
    )
    assert config.max_context == text.max_position_embeddings
    assert config.norm_eps == text.rms_norm_eps
    own_rope = FAMILIES[TEXT_DECODERS[kind].family].rope_parameters
    thetas = text.rope_parameters.get("rope_theta") if own_rope else text.default_theta
    if "sliding_attention" in own_rope:
        thetas = {kind: each["rope_theta"] for kind, each in text.rope_parameters.items()}
    assert {rope.theta for rope in config.ropes} == {
        *(thetas.values() if isinstance(thetas, dict) else [thetas])
    }


def test_a_head_that_is_stored_with_the_embeddings_it_is_tied_to_is_served(folders, tmp_path):
    folder = shutil.copytree(folders["llava"], tmp_path / "copy")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    (embeddings,) = (t for name, t in tensors.items() if name.endswith("embed_tokens.weight"))
    head = next(name for name in tensors if name.endswith("lm_head.weight"))
    save_file(tensors | {head: embeddings.clone()}, folder / "model.safetensors")
    with torch.inference_mode():
        want = reference(folder)(input_ids=torch.tensor([PROMPT])).logits[0]
    assert_equal(logits(folder), want)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_unified", "mistral3", "qwen2_5_vl"])
def test_an_adapter_of_the_whole_model_answers_as_peft_does(folders, tmp_path, name):
    """Its names begin with model.language_model, as PEFT finds the modules."""
    folder, prompt = folders[name], PROMPT[:21]
    lora = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=r".*language_model.*\.(q_proj|v_proj|up_proj|down_proj)"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = peft.get_peft_model(reference(folder), lora)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(0.0, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(".language_model." in name for name in names)
    shelf = BlobShelf(tmp_path / "blobs")
    ref = shelf.add(tmp_path / "adapter", "described")
    answers = Answers(build(folder, shelf, tmp_path / "cache"))
    answers.submit(greedy("a", prompt, adapter=ref))
    answers.submit(greedy("b", prompt))
    answers.all()
    answers.engine.close()
    assert answers.of("a") == generated(model, prompt)
    assert answers.of("b") == generated(reference(folder), prompt) != answers.of("a")


def generated(model, prompt):
    tokens = list(prompt)
    for _ in range(12):
        with torch.inference_mode():
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_an_adapter_that_changes_how_images_are_seen_is_refused_by_name(folders, tmp_path):
    lora = peft.LoraConfig(r=4, target_modules=r".*visual.*\.qkv")
    peft.get_peft_model(reference(folders["qwen2_5_vl"]), lora).save_pretrained(tmp_path / "a")
    with pytest.raises(AdapterRejected, match="it changes the vision part of the base model alone"):
        BlobShelf(tmp_path / "blobs").add(tmp_path / "a", "seeing")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "smolvlm"}, "model_type"),
        ({"text_config": {**SIZES, "model_type": "glm4v_text"}}, "model_type"),
        ({"text_config": [1]}, "text_config"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_an_unsupported_value_is_refused_by_its_key(folders, tmp_path, changes, field):
    folder = shutil.copytree(folders["llava"], tmp_path / "copy")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ModelError) as refused:
        rehearse_load(folder, torch.float32)
    assert refused.value.field == field
