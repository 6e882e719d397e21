"""What a checkpoint says of its layers' keys and values in FP8."""

import math

from lorikeet_engine.errors import ModelError
from lorikeet_engine.kernels.fp8_kv import KvScales
from lorikeet_engine.models.checkpoint import Checkpoint


def read_kv_scales(checkpoint: Checkpoint, layer: int) -> KvScales:
    """A layer's scales as compressed-tensors, vLLM or ModelOpt name them; 1 for what has none.

    Raises ModelError, whose `field` is the tensor's name, for a scale that is no number above 0.
    """
    path = f"model.layers.{layer}.self_attn"
    return KvScales(key=_scale(checkpoint, path, "k"), value=_scale(checkpoint, path, "v"))


def _scale(checkpoint: Checkpoint, path: str, part: str) -> float:
    for owner in ("", "attn.", f"{part}_proj."):
        name = f"{path}.{owner}{part}_scale"
        scale = checkpoint.scalar(name)
        if scale is None:
            continue
        if not 0 < scale < math.inf:
            raise ModelError(
                f"{checkpoint.folder}: tensor {name} is {scale}: want a number above 0", field=name
            )
        return scale
    return 1.0
