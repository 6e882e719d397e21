"""Further or missing keys of a config, and invalid configs."""

import json
from typing import Any

from lorikeet_engine.adapter_format import CONFIG_FILE
from tests.corpus.draft import Draft
from tests.corpus.features import EQUAL, Axis, Build, Feature
from tests.corpus.peft_training import EVERY_LINEAR

_UNKNOWN = "this option is not known"
# Without these keys a PEFT config does not define the adapter; other keys kept their defaults.
_OF_OLD = ("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules")


def _keys(name: str, says: str = EQUAL, **keys: Any) -> Feature:
    """Feature that adds keys to the config."""
    return Feature(name, Axis.CONFIG, lambda draft: draft.edit_config(**keys), says)


def _text(name: str, build: Build, says: str = EQUAL) -> Feature:
    return Feature(name, Axis.CONFIG, build, says, frozenset({Axis.BASE_NAME}))


def _of_every_linear(name: str, **keys: Any) -> Feature:
    """Feature that adds keys fitting an adapter of every linear at one rank."""
    own = frozenset({Axis.TRAINING, Axis.TOOL})
    return Feature(name, Axis.CONFIG, lambda draft: draft.edit_config(**keys), EQUAL, own)


def _bytes(name: str, data: bytes, says: str) -> Feature:
    return _text(name, lambda draft: (draft.folder / CONFIG_FILE).write_bytes(data), says)


def _without_defaults(draft: Draft) -> None:
    """Remove keys that are null, false or empty, as configs of old PEFT have none."""
    config = draft.config()
    draft.write_config({key: v for key, v in config.items() if v or key in _OF_OLD})


def _minified(draft: Draft) -> None:
    text = json.dumps(dict(reversed(draft.config().items())), separators=(",", ":"))
    (draft.folder / CONFIG_FILE).write_text(text)


def _with_windows_lines(draft: Draft) -> None:
    text = json.dumps(draft.config(), indent=4).replace("\n", "\r\n")
    (draft.folder / CONFIG_FILE).write_bytes(text.encode())


def _twice(draft: Draft) -> None:
    text = json.dumps(draft.config())
    (draft.folder / CONFIG_FILE).write_text(f'{text[:-1]}, "r": 8}}')


# Methods that PEFT's config can name; none is trained here.
_METHODS: tuple[tuple[str, str, Any], ...] = (
    ("use_dora", "lora_magnitude_vector is missing, and use_dora is set", True),
    ("lora_bias", "lora_B.bias is missing, and lora_bias is set", True),
    ("loftq_config", "LoftQ changes the base model", {"loftq_bits": 4, "loftq_iter": 1}),
    ("use_qalora", "QA-LoRA", True),
    ("use_bdlora", "block-diagonal", {"nblocks": 2, "target_modules_bd_a": ["q_proj"]}),
    ("arrow_config", "routing between adapters", {"top_k": 3}),
    ("kasa_config", "KaSA changes the base model", {"beta": 1e-4}),
    ("megatron_config", "Megatron's parallel layers", {"params_dtype": "bf16"}),
    ("layer_replication", "another base model", [[0, 2], [1, 3]]),
    ("target_parameters", "no weight is for a parameter", ["mlp.experts.gate_up_proj"]),
    ("alora_invocation_tokens", "invocation has token|cannot activate", [128_006, 78]),
    ("modules_to_save", "whole modules", ["norm"]),
    ("use_qa_lora", "QA-LoRA", True),
)
_INITS = ("pissa_niter_16", "loftq", "olora", "corda", "lora_ga", "an init of next year", 7)

CONFIG: tuple[Feature, ...] = (
    # Harmless keys.
    _keys("unsloth_version", unsloth_version="2026.11.2"),
    # unslothai/unsloth 015bdef, studio/backend/core/training/trainer.py.
    _keys("Unsloth Studio", unsloth_training_method="qlora", unsloth_load_in_4bit=True),
    # modelscope/ms-swift 3602360, swift/tuners/lora.py.
    _keys(
        "ms-swift's own LoRA",
        swift_type="LORA",
        lora_dtype="bfloat16",
        lorap_lr_ratio=16.0,
        lorap_emb_lr=1e-06,
        use_qa_lora=False,
        use_merged_linear=False,
        enable_lora=None,
        model_key_mapping=None,
    ),
    # axolotl-ai-cloud/axolotl 067b021, integrations/kernels/merge_aware_callback.py.
    _keys("axolotl for NVFP4", nvfp4_merge_aware={"scale_mode": "fresh", "start_step": 5}),
    _keys("what a Python class keeps", _from_model_config=True, transformers_version="4.35.0"),
    _keys("fan_in_fan_out beside other linears", fan_in_fan_out=True),
    _keys("a bias that no linear has", bias="all"),
    _keys("a bias that is null", bias=None),
    _keys("whole modules of a vision part", modules_to_save=["multi_modal_projector"]),
    _keys(
        "Unsloth's mapping",
        auto_mapping={
            "base_model_class": "LlamaForCausalLM",
            "parent_library": "transformers.models.llama.modeling_llama",
            "unsloth_fixed": True,
            "lora_B_layout": "rank_major",  # of experts, since 2026.9.6
        },
    ),
    _keys("finetuning_type", finetuning_type="lora"),
    _keys(
        "the base model's quantisation",
        quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    _keys("a task", task_type="SEQ_2_SEQ_LM"),
    _keys("still in training", inference_mode=False),
    _keys("new options that are off", use_next_year=False, next_config=None, others=[]),
    # huggingface/peft 26577ab, src/peft/tuners/lora.py.
    _keys("PEFT 0.2's keys", merge_weights=False, enable_lora=None),
    _keys("PEFT 0.2's weights merged", merge_weights=True, enable_lora=None),
    _keys("configs of what did not happen", eva_config={"rho": 2.0}, corda_config={"verbose": 1}),
    _of_every_linear("empty lists", layers_to_transform=[], layers_pattern=[], exclude_modules=[]),
    _of_every_linear("a pattern of nothing", rank_pattern={"c_attn": 5}, alpha_pattern={"h.0": 3}),
    _of_every_linear("all-linear as a word", target_modules="All-Linear"),
    _of_every_linear(
        "targets of other models too",
        target_modules=[*EVERY_LINEAR, "query_key_value", "fc1", "lm_heads"],
    ),
    _text("without what is null or false", _without_defaults),
    _text("in one line, the other way round", _minified),
    _text("with Windows' line ends", _with_windows_lines),
    # Keys that would change the numbers.
    *(_keys(key, says, **{key: value}) for key, says, value in _METHODS),
    *(
        _keys(f"init_lora_weights: {init}", "that method may change", init_lora_weights=init)
        for init in _INITS
    ),
    _keys("an unknown option", _UNKNOWN, use_next_year=True),
    _keys("an unknown config", _UNKNOWN, next_config={"alpha": 0.5}),
    _keys("PEFT 0.2's merged linears", "as PEFT 0.2 did", enable_lora=[True, False, True]),
    _keys("a bias of another kind", "want none, all or lora_only", bias="some"),
    _keys("finetuning_type: another", "only LoRA can be served", finetuning_type="oft"),
    # volcengine/verl 682b420, verl/model_merger/base_model_merger.py.
    _keys("alpha that nobody set", "lora_alpha: 0", lora_alpha=0),
    _keys("no alpha", "want an alpha", lora_alpha=None),
    _keys("alpha in words", "want an alpha", lora_alpha="16"),
    _keys("alpha out of range", "want an alpha", lora_alpha=10**9),
    _keys("a fraction as rank", "want a rank", r=8.0),
    _keys("rank zero in the config", "want a rank", r=0),
    _keys("use_rslora in words", "want true or false", use_rslora="yes"),
    _keys("targets that are others", "leaves out|no weight is for it", target_modules=["up_proj"]),
    _keys("targets that are a number", "want a text or a list of texts", target_modules=7),
    _keys("targets that are no expression", "no regular expression", target_modules=".*("),
    _keys(
        "a rank_pattern that is wrong",
        "the weights have rank .* and the config says 61",
        rank_pattern={".*": 61},
    ),
    _bytes(
        "a pointer of Git LFS", b"version https://git-lfs.github.com/spec/v1\n", "not valid JSON"
    ),
    _bytes("an array", b"[]", "is not a JSON object"),
    _bytes("cut in the middle", b'{"r": 8, "lora_al', "not valid JSON"),
    _bytes("alpha that is NaN", b'{"peft_type": "LORA", "lora_alpha": NaN}', "not a JSON number"),
    _text("a key twice", _twice, "a key appears twice"),
)
