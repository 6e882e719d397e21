"""Order of LoRA ranks in Unsloth's adapters of experts' parameters.

Unsloth trains gate_up_proj and down_proj of experts as PEFT's target_parameters, and saves PEFT's
files. From 2026.2 to 2026.9.5 it ordered B's columns by experts, and PEFT orders them by ranks.
Later releases order as PEFT, and write the order into adapter_config.json. Source: unsloth_zoo
2026.10.9, temporary_patches/moe_utils.py (saved_lora_b_layouts).
"""

from collections.abc import Mapping
from typing import Any

from lorikeet_engine.errors import AdapterRejected

LAYOUT_KEY = "lora_B_layout"
_DETAIL_KEY = "unsloth_fused_expert_lora"
_BY_RANKS, _BY_EXPERTS = "rank_major", "grouped_by_expert"


def is_grouped_by_expert(parameter: str, raw: Mapping[str, Any]) -> bool:
    """Whether the columns of a parameter's B are ordered by experts, then by ranks.

    parameter: gate_up_proj or down_proj.
    raw: PEFT's config.

    Raises AdapterRejected if Unsloth trained the adapter, and its config does not show the order.
    """
    note = raw.get("auto_mapping")
    note = note if isinstance(note, Mapping) else {}
    for source in (raw, note):
        detail = source.get(_DETAIL_KEY)
        parameters = detail.get("parameters") if isinstance(detail, Mapping) else None
        if isinstance(parameters, Mapping) and isinstance(parameters.get(parameter), Mapping):
            return _is_by_experts(parameters[parameter].get(LAYOUT_KEY))
        if source.get(LAYOUT_KEY) is not None:
            return _is_by_experts(source[LAYOUT_KEY])
    if note.get("unsloth_fixed") and raw.get("target_parameters"):
        raise AdapterRejected(
            f"Unsloth before 2026.9.6 trained {parameter} of experts, and orders its lora_B "
            "otherwise than PEFT unless UNSLOTH_MOE_LORA_MERGED was 1: load and save the adapter "
            f"with today's Unsloth, or set {LAYOUT_KEY} in adapter_config.json to {_BY_EXPERTS}, "
            f"or to {_BY_RANKS} for PEFT's order",
            field=LAYOUT_KEY,
        )
    return False


def _is_by_experts(layout: object) -> bool:
    if layout not in (_BY_RANKS, _BY_EXPERTS):
        raise AdapterRejected(
            f"{LAYOUT_KEY} is {layout!r}: want {_BY_RANKS} or {_BY_EXPERTS}", field=LAYOUT_KEY
        )
    return layout == _BY_EXPERTS
