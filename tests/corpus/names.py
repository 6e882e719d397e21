"""Names of tensors: wrappers of the model, and paths of the language model."""

import re
from collections.abc import Callable

import torch

from tests.corpus.draft import Draft, Tensors
from tests.corpus.features import EQUAL, Axis, Build, Feature

_PREFIX = "base_model.model."
_IN_MEGATRON = {
    "self_attn.q_proj": "self_attention.linear_qkv",
    "self_attn.o_proj": "self_attention.linear_proj",
    "mlp.gate_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
}
_OTHER_FORMAT = "is not part of a LoRA adapter"


def _called(adapter: str) -> Callable[[str], str]:
    """Add the adapter's name to LoRA's tensors, but not to copies of the base model's."""
    return lambda name: name.replace(".weight", f".{adapter}.weight") if "lora_" in name else name


def _renamed(change: Callable[[str], str]) -> Build:
    return lambda draft: draft.rename(change)


def _in_layers(wrapper: str) -> Build:
    """Insert the name of a wrapper around each decoder layer."""
    return _renamed(lambda name: re.sub(r"(layers\.\d+\.)", rf"\1{wrapper}.", name))


def _wrapping(name: str, build: Build, says: str = EQUAL) -> Feature:
    return Feature(name, Axis.WRAPPING, build, says)


def _foreign(name: str, change: Callable[[str], str], says: str = _OTHER_FORMAT) -> Feature:
    """Feature that names tensors as another program does; the file is otherwise PEFT's."""
    return Feature(
        name, Axis.WRAPPING, _renamed(change), says, frozenset({Axis.TRAINING, Axis.PLACE})
    )


def _underlined(name: str, down: str, up: str) -> str:
    module = name.removeprefix(_PREFIX).partition(".lora_")[0].replace(".", "_")
    return f"lora_unet_{module}.{down if 'lora_A' in name else up}.weight"


def _of_megatron(tensors: Tensors) -> Tensors:
    """Name tensors of linears that Megatron fuses by the fused linear."""
    kept = {n: t for n, t in tensors.items() if any(part in n for part in _IN_MEGATRON)}
    return {_megatron_name(name): tensor for name, tensor in kept.items()}


def _megatron_name(name: str) -> str:
    module, _, side = name.removeprefix(f"{_PREFIX}model.").partition(".lora_")
    for part, fused in _IN_MEGATRON.items():
        module = module.replace(part, fused)
    return f"module.decoder.{module}.adapter.linear_{'in' if side[0] == 'A' else 'out'}.weight"


WRAPPING: tuple[Feature, ...] = (
    _wrapping("without PEFT's prefix", _renamed(lambda name: name.removeprefix(_PREFIX))),
    _wrapping("of data parallelism", _renamed(lambda name: f"module.{name}")),
    _wrapping("of torch.compile, all", _renamed(lambda name: f"_orig_mod.{name}")),
    _wrapping(
        "of torch.compile, inside",
        _renamed(lambda name: name.replace(_PREFIX, f"{_PREFIX}_orig_mod.")),
    ),
    _wrapping("of torch.compile, each layer", _in_layers("_orig_mod")),
    _wrapping(
        "of torch.compile around data parallelism",
        _renamed(lambda name: f"_orig_mod.module.{name}"),
    ),
    _wrapping("of FSDP", _in_layers("_fsdp_wrapped_module")),
    _wrapping("of checkpointed activations", _in_layers("_checkpoint_wrapped_module")),
    _wrapping(
        "of both of these",
        _in_layers("_fsdp_wrapped_module._checkpoint_wrapped_module"),
    ),
    _wrapping(
        "with a vision tower beside it",
        lambda draft: draft.edit_weights(
            lambda tensors: (
                tensors
                | {
                    f"{_PREFIX}visual.blocks.0.qkv.lora_{side}.weight": torch.ones(4, 4)
                    for side in "AB"
                }
            )
        ),
    ),
    _wrapping("with the name default", _renamed(_called("default"))),
    _wrapping("with another name", _renamed(_called("my-adapter_2"))),
    _wrapping(
        "of PEFT twice",
        _renamed(lambda name: _PREFIX + name),
        "cannot be adapted",
    ),
    # kohya-ss/sd-scripts 6a584ca, networks/lora.py.
    _foreign("kohya's", lambda name: _underlined(name, "lora_down", "lora_up")),
    # huggingface/diffusers 0023a2c, src/diffusers/utils/state_dict_utils.py.
    _foreign(
        "diffusers'",
        lambda name: (
            name.replace(_PREFIX, "text_encoder.")
            .replace("lora_A", "lora_linear_layer.down")
            .replace("lora_B", "lora_linear_layer.up")
        ),
    ),
    # microsoft/LoRA 2eb74c2, loralib/layers.py: parameters, not modules.
    _foreign("loralib's", lambda name: name.removeprefix(_PREFIX).removesuffix(".weight")),
    # pytorch/torchtune 00c242b, models/convert_weights.py, before that converts them for PEFT.
    _foreign(
        "torchtune's own",
        lambda name: (
            name.removeprefix(f"{_PREFIX}model.")
            .replace("self_attn", "attn")
            .replace("lora_A", "lora_a")
            .replace("lora_B", "lora_b")
        ),
    ),
    # Lightning-AI/litgpt a2bc140, litgpt/lora.py.
    _foreign(
        "LitGPT's",
        lambda name: name.replace(f"{_PREFIX}model.layers", "transformer.h").removesuffix(
            ".weight"
        ),
    ),
    # NVIDIA-NeMo/Megatron-Bridge 355cef4, src/megatron/bridge/peft/lora.py, and NeMo before it.
    Feature(
        "Megatron's and NeMo's own",
        Axis.WRAPPING,
        lambda draft: draft.edit_weights(_of_megatron),
        _OTHER_FORMAT,
        frozenset({Axis.TRAINING, Axis.PLACE}),
    ),
)


def _place(name: str, was: str, says: str = EQUAL) -> Feature:
    """Feature that moves the layers to another path than `model`.

    was: the other path, with a dot at its end.
    """
    return Feature(
        name,
        Axis.PLACE,
        _renamed(lambda tensor: tensor.replace("model.layers.", f"{was}layers.")),
        says,
    )


def _without_head(draft: Draft) -> None:
    """Name modules as transformers' AutoModel does, which sentence-transformers trains."""
    draft.rename(lambda name: name.replace("model.layers.", "layers."))
    draft.edit_config(task_type="FEATURE_EXTRACTION")


PLACE: tuple[Feature, ...] = (
    Feature("a model without its head", Axis.PLACE, _without_head),
    _place("a vision model's language model", "model.language_model."),
    _place("an older vision model's language model", "language_model.model."),
    _place("an omni model's thinker", "thinker.model.", "thinker.* cannot be adapted"),
    _place("an encoder's layers", "encoder.", "encoder.layers.* cannot be adapted"),
)
