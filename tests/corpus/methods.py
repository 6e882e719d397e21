"""PEFT's methods other than LoRA, as `save_pretrained` writes them."""

from collections.abc import Callable
from typing import Any

import peft

from tests.corpus.features import Axis, Feature
from tests.corpus.peft_training import save

_ONLY_LORA = "only LORA adapters can be served"
_ALONE = frozenset({Axis.NUMBERS, Axis.TOOL, Axis.DAMAGE, Axis.WRAPPING, Axis.PLACE})


def _method(name: str, config: Callable[[], peft.PeftConfig], says: str = _ONLY_LORA) -> Feature:
    return Feature(name, Axis.TRAINING, lambda draft: save(draft, config()), says, _ALONE)


def _linears(kind: Callable[..., peft.PeftConfig], **options: Any) -> Callable[[], peft.PeftConfig]:
    return lambda: kind(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **options)


def _virtual(kind: Callable[..., peft.PeftConfig], **options: Any) -> Callable[[], peft.PeftConfig]:
    return lambda: kind(task_type="CAUSAL_LM", num_virtual_tokens=3, **options)


METHODS: tuple[Feature, ...] = (
    _method("IA3", _linears(peft.IA3Config, feedforward_modules=[])),
    _method("AdaLoRA", _linears(peft.AdaLoraConfig, total_step=9)),
    _method("LoHa", _linears(peft.LoHaConfig)),
    _method("LoKr", _linears(peft.LoKrConfig)),
    _method("OFT", _linears(peft.OFTConfig, oft_block_size=8)),
    _method("VeRA", _linears(peft.VeraConfig, r=4)),
    _method("FourierFT", _linears(peft.FourierFTConfig, n_frequency=10)),
    _method("HRA", _linears(peft.HRAConfig)),
    _method("RandLoRA", _linears(peft.RandLoraConfig, r=4)),
    _method("SHiRA", _linears(peft.ShiraConfig, r=4)),
    _method("norms alone", lambda: peft.LNTuningConfig(task_type="CAUSAL_LM")),
    _method("prompt tuning", _virtual(peft.PromptTuningConfig)),
    _method("P-tuning", _virtual(peft.PromptEncoderConfig)),
    _method("prefix tuning", _virtual(peft.PrefixTuningConfig)),
    _method(
        "tokens alone",
        lambda: peft.TrainableTokensConfig(token_indices=[5], target_modules=["embed_tokens"]),
    ),
)
