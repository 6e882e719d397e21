"""Which layers of a decoder look back on a few tokens alone, by config.json."""

from collections.abc import Mapping
from typing import Any

from lorikeet_engine.adapter_format import Family
from lorikeet_engine.adapter_format.base_config import flag, integer, refusal

_KINDS = {"full_attention": False, "sliding_attention": True}


def windows(
    raw: Mapping[str, Any], sliding: tuple[bool, ...], context: int
) -> tuple[int | None, ...]:
    """How many tokens each layer's queries see, up to themselves; None where they see all.

    sliding: as sliding_layers returns it. A window that is as long as the context hides nothing.
    Raises ModelError.
    """
    if not any(sliding) or raw["sliding_window"] is None:
        return (None,) * len(sliding)
    window = integer(raw, "sliding_window")
    return tuple(window if slides and window < context else None for slides in sliding)


def sliding_layers(
    raw: Mapping[str, Any], family: Family, turning: tuple[bool, ...]
) -> tuple[bool, ...]:
    """Which layers have a sliding window, if the model has one.

    turning: whether each layer has a rotary embedding. Raises ModelError.
    """
    layers, switches = range(len(turning)), family.switches
    if "sliding_window" not in switches:
        return (False,) * len(layers)
    if "use_sliding_window" in switches and not flag(raw, "use_sliding_window"):
        return (False,) * len(layers)
    if "layer_types" in switches and raw["layer_types"] is not None:
        return _of_kinds(raw["layer_types"], len(layers))
    if "sliding_window_pattern" in switches:
        every = integer(raw, "sliding_window_pattern")
        return tuple((layer + 1) % every != 0 for layer in layers)
    if "max_window_layers" in switches:
        return tuple(layer >= raw["max_window_layers"] for layer in layers)
    if "no_rope_layers" in switches:
        return tuple(not turns for turns in turning)
    return (True,) * len(layers)


def _of_kinds(kinds: object, layers: int) -> tuple[bool, ...]:
    if not isinstance(kinds, list) or len(kinds) != layers or not {*kinds} <= {*_KINDS}:
        raise refusal("layer_types", kinds, f"a list of {layers} of {' and '.join(_KINDS)}")
    return tuple(_KINDS[kind] for kind in kinds)
