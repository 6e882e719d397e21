"""Scales of FP8 keys and values in a checkpoint, under the names of several tools."""

import math

from lorikeet_engine.errors import ModelError
from lorikeet_engine.kernels.fp8_kv import KvScales
from lorikeet_engine.models.checkpoint import Checkpoint

# Names under a layer's attention, of compressed-tensors, vLLM, ModelOpt, compressed-tensors up
# to 0.5, and AutoFP8's first release.
_NAMES = ("{}_scale", "attn.{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale", "kv_scale")


def read_kv_scales(checkpoint: Checkpoint, path: str) -> KvScales:
    """Read a layer's scales of FP8 keys and values. A scale that the checkpoint lacks is 1.

    If each head has a scale, the largest is returned. Raises ModelError, whose `field` is the
    tensor's name, unless all scales are numbers above 0.

    path: path of the layer's attention, such as model.layers.0.self_attn.
    """
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
