"""The settings of one engine."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from lorikeet_engine.adapter_format import Quantization
from lorikeet_engine.device.memory import Memory
from lorikeet_engine.errors import SettingsError
from lorikeet_engine.kernels.fp8_kv import FP8_KV

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ROUNDINGS = {"auto": None, "nf4": Quantization.NF4, "fp8": Quantization.FP8}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """An engine's settings; sizes are in bytes. Raises SettingsError when built.

    model: a Hugging Face checkpoint's folder. dtype: of the base model.
    weight_dtype: auto; or nf4: the linears' weights are rounded to NF4's values, which adapters
    were trained on with QLoRA, and stay in dtype; or fp8: they are rounded to FP8 and stay so, in
    half of bfloat16's bytes.
    kv_dtype: of the KV cache: auto, the base model's, or fp8 (E4M3), in half of 16 bits' memory.
    kv_bytes, adapter_gpu_bytes: bytes, or a MemoryShare of what is free on the device: for the slot
    pool beside the base model's weights, for the KV cache beside all else that serving needs.
    page_size: tokens of a KV page. max_context: prompt plus output in tokens; None for as many as
    the model and the KV cache allow. max_batch_tokens, max_running, max_batch_adapters: tokens,
    sequences and distinct adapters of one step. cache_dir: the adapters' disk cache.
    inter_token_goal_s: how long a step with decodes may take, for which the ranks of its adapters
    and the tokens of prompts beside the decodes are bounded; never below one adapter and 128 such
    tokens. None for no bound.
    tensor_parallel: how many GPUs of this machine hold the base model together, each a part of it;
    kv_bytes and adapter_gpu_bytes are of each. On a CPU, as many processes.
    overlap: launch a step before the tokens of the one before it are read, so that a GPU need not
    wait for the host; a CPU gains nothing by it and makes each token wait for one more step.
    """

    model: Path
    cache_dir: Path
    device: str = "cpu"
    dtype: str = "float32"
    weight_dtype: str = "auto"
    kv_dtype: str = "auto"
    adapter_dtype: str = "float32"
    page_size: int = 16
    kv_bytes: Memory = 256 << 20
    max_context: int | None = None
    max_batch_tokens: int = 2048
    max_running: int = 256
    max_batch_adapters: int = 128
    adapter_gpu_bytes: Memory = 64 << 20
    adapter_host_bytes: int = 256 << 20
    adapter_disk_bytes: int = 4 << 30
    max_rank: int = 64
    max_adapter_bytes: int = 1 << 30
    inter_token_goal_s: float | None = None
    overlap: bool = True
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("dtype", "adapter_dtype"):
            if getattr(self, name) not in _DTYPES:
                raise SettingsError(f"{name}={getattr(self, name)!r}: want {', '.join(_DTYPES)}")
        if self.weight_dtype not in _ROUNDINGS:
            raise SettingsError(f"weight_dtype={self.weight_dtype!r}: want {', '.join(_ROUNDINGS)}")
        if self.kv_dtype not in ("auto", "fp8"):
            raise SettingsError(f"kv_dtype={self.kv_dtype!r}: want auto or fp8")
        for name in ("page_size", "max_running", "max_batch_adapters", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}={getattr(self, name)}: want an integer ≥ 1")
        if self.tensor_parallel > 1 and self.device not in ("cpu", "cuda"):
            raise SettingsError(
                f"device={self.device}: want cuda, of which each rank takes the next"
            )
        if self.inter_token_goal_s is not None and not 0 < self.inter_token_goal_s < math.inf:
            raise SettingsError(
                f"inter_token_goal_s={self.inter_token_goal_s}: want seconds above 0, or None"
            )
        if self.max_batch_tokens < self.max_running:
            raise SettingsError(
                f"max_batch_tokens={self.max_batch_tokens}: want at least max_running "
                f"({self.max_running}), since every running sequence makes a token each step"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch.dtype of `dtype`."""
        return _DTYPES[self.dtype]

    @property
    def rounding(self) -> Quantization | None:
        """What weight_dtype rounds the linears' weights to; None: nothing."""
        return _ROUNDINGS[self.weight_dtype]

    @property
    def torch_kv_dtype(self) -> torch.dtype:
        """The torch.dtype of the KV cache."""
        return FP8_KV if self.kv_dtype == "fp8" else self.torch_dtype

    @property
    def torch_adapter_dtype(self) -> torch.dtype:
        """The torch.dtype of `adapter_dtype`."""
        return _DTYPES[self.adapter_dtype]
