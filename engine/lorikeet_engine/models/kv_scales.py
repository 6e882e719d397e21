"""What a checkpoint says of its layers' keys and values in FP8."""

import math

from lorikeet_engine.errors import ModelError
from lorikeet_engine.kernels.fp8_kv import KvScales
from lorikeet_engine.models.checkpoint import Checkpoint

# Under model.layers.N.self_attn: compressed-tensors', vLLM's, ModelOpt's, compressed-tensors' up to
# 0.5 and AutoFP8's first.
_NAMES = ("{}_scale", "attn.{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale", "kv_scale")


def read_kv_scales(checkpoint: Checkpoint, layer: int) -> KvScales:
    """A layer's scales, under any of their names; 1 for what has none.

    Where each head has one, the largest. Raises ModelError, whose `field` is the tensor's name, for
    a scale that is no number above 0.
    """
    path = f"model.layers.{layer}.self_attn"
    return KvScales(key=_scale(checkpoint, path, "k"), value=_scale(checkpoint, path, "v"))


def _scale(checkpoint: Checkpoint, path: str, part: str) -> float:
    names = [f"{path}.{name.format(part, part)}" for name in _NAMES]
    name = next((name for name in names if name in checkpoint), None)
    if name is None:
        return 1.0
    scales = checkpoint.floats(name)
    if not scales.numel() or not bool(((scales > 0) & (scales < math.inf)).all()):
        raise ModelError(
            f"{checkpoint.folder}: tensor {name} is {scales.tolist()}: want numbers above 0",
            field=name,
        )
    return float(scales.max())
