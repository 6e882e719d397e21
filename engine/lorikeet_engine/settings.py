"""Settings of one inference engine."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from lorikeet_engine.adapter_format import Quantization
from lorikeet_engine.device.memory import Memory
from lorikeet_engine.errors import SettingsError
from lorikeet_engine.kernels.fp8_kv import FP8_KV

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ROUNDINGS = {"auto": None, "packed": None, "nf4": Quantization.NF4, "fp8": Quantization.FP8}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine; sizes are in bytes. Raises SettingsError when built with bad values.

    model: folder of a Hugging Face checkpoint.
    cache_dir: folder of the adapters' disk cache.
    dtype: dtype of the base model.
    weight_dtype: `auto` leaves the linears' weights as they are, but those of 4 bits become floats
        in dtype. Only experts in MXFP4 stay packed where the GPUs have kernels for them
        (`stays_packed` in execution/assembly.py). `packed` keeps a checkpoint's weights of 4 bits,
        which are decoded while they are multiplied. `nf4` rounds weights to NF4's values, on which
        QLoRA trains adapters, but stores them in dtype. `fp8` rounds them to FP8 and stores them in
        FP8, which takes half of bfloat16's bytes.
    kv_dtype: dtype of the KV cache: `auto` is the base model's, `fp8` is E4M3, which takes half the
        bytes of 16 bits.
    state_dtype: dtype of the states of delta nets: `float32`, as Qwen's checkpoints say, or
        `bfloat16`, which takes half the bytes and is less exact (docs/base-models.md).
    page_size: number of tokens of a KV page.
    kv_bytes: size of the KV cache: bytes, or a MemoryShare of the memory that all other parts of
        serving leave free on the device.
    state_bytes: size of the states of delta nets: bytes, or a MemoryShare of the memory that all
        other parts but the KV cache leave free on the device; None divides this memory between
        states and KV cache (execution/memory_plan.py).
    kv_host_bytes: size of the host memory for KV pages that leave the prefix cache, of all ranks
        together; 0 for none. In a model with delta nets or Mamba 2, half of it is for states.
    kv_disk_bytes: size of the files in cache_dir for KV pages that leave that host memory, of all
        ranks together; 0 for none.
    max_context: maximum number of tokens of prompt plus output; None for as many as model and KV
        cache allow.
    max_batch_tokens: maximum number of tokens in one step.
    max_running: maximum number of sequences in one step.
    max_batch_adapters: maximum number of distinct adapters in one step.
    adapter_gpu_bytes: size of the adapters' memory on the GPU: bytes, or a MemoryShare of the
        memory that the base model's weights leave free on the device.
    moving_border: whether the adapters borrow memory from the KV cache while they need it more
        (execution/border.py); adapter_gpu_bytes is then what they have at least.
    inter_token_goal_s: goal for the seconds of a step with decodes. It limits the step's prompt and
        drafted tokens and the sum of its adapters' ranks, but always allows one adapter and 128
        prompt tokens. None: no goal; steps with drafts are as long as yields most tokens a second.
    overlap: launch a step before the tokens of the previous step are read, so that a GPU need not
        wait for the host. A CPU gains nothing, and each token waits for one more step.
    speculation: `lookup` drafts tokens of answers that repeat their prompts, themselves or recent
        answers of their adapter, and verifies several in a step; the tokens of answers stay the
        same. `mtp` also drafts one token by the checkpoint's head for multi-token prediction,
        `draft` up to eight by an adapter pinned as draft (Engine.pin). `off`: no drafts.
    max_added_tokens: number of tokens behind the base model's vocabulary that adapters may have of
        their own. Logits of all sequences have as many columns more.
    tensor_parallel: number of this machine's GPUs that share the base model, each holding a part of
        it; kv_bytes, state_bytes and adapter_gpu_bytes are those of each GPU. On a CPU, the number
        of processes.
    """

    model: Path
    cache_dir: Path
    device: str = "cpu"
    dtype: str = "float32"
    weight_dtype: str = "auto"
    kv_dtype: str = "auto"
    state_dtype: str = "float32"
    adapter_dtype: str = "float32"
    page_size: int = 16
    kv_bytes: Memory = 256 << 20
    state_bytes: Memory | None = None
    kv_host_bytes: int = 0
    kv_disk_bytes: int = 0
    max_context: int | None = None
    max_batch_tokens: int = 2048
    max_running: int = 256
    max_batch_adapters: int = 128
    adapter_gpu_bytes: Memory = 64 << 20
    moving_border: bool = False
    adapter_host_bytes: int = 256 << 20
    adapter_disk_bytes: int = 4 << 30
    max_rank: int = 64
    max_adapter_bytes: int = 1 << 30
    max_added_tokens: int = 0
    inter_token_goal_s: float | None = None
    overlap: bool = True
    speculation: str = "off"
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("dtype", "adapter_dtype"):
            if getattr(self, name) not in _DTYPES:
                raise SettingsError(f"{name}={getattr(self, name)!r}: want {', '.join(_DTYPES)}")
        if self.weight_dtype not in _ROUNDINGS:
            raise SettingsError(f"weight_dtype={self.weight_dtype!r}: want {', '.join(_ROUNDINGS)}")
        if self.kv_dtype not in ("auto", "fp8"):
            raise SettingsError(f"kv_dtype={self.kv_dtype!r}: want auto or fp8")
        if self.state_dtype not in ("float32", "bfloat16"):
            raise SettingsError(f"state_dtype={self.state_dtype!r}: want float32 or bfloat16")
        if self.speculation not in ("off", "lookup", "mtp", "draft"):
            raise SettingsError(f"speculation={self.speculation!r}: want off, lookup, mtp or draft")
        if self.speculation == "draft" and self.max_batch_adapters < 2:
            raise SettingsError(
                f"speculation=draft, max_batch_adapters={self.max_batch_adapters}: want at least "
                "2, as the draft LoRA is one of a step's adapters",
                field="max_batch_adapters",
            )
        if self.speculation == "mtp" and self.tensor_parallel > 1:
            raise SettingsError(
                f"speculation=mtp, tensor_parallel={self.tensor_parallel}: the MTP head is served "
                "by one GPU alone: want lookup, off, or tensor_parallel=1",
                field="speculation",
            )
        for name in ("page_size", "max_running", "max_batch_adapters", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}={getattr(self, name)}: want an integer ≥ 1")
        for name in ("kv_host_bytes", "kv_disk_bytes"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name}={getattr(self, name)}: want bytes ≥ 0")
        if self.kv_disk_bytes and not self.kv_host_bytes:
            raise SettingsError(
                "kv_disk_bytes without kv_host_bytes: pages go to the disk from host memory",
                field="kv_disk_bytes",
            )
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
        """torch.dtype of the base model, which `dtype` names."""
        return _DTYPES[self.dtype]

    @property
    def rounding(self) -> Quantization | None:
        """Number format that the linears' weights are rounded to; None for no rounding."""
        return _ROUNDINGS[self.weight_dtype]

    @property
    def torch_kv_dtype(self) -> torch.dtype:
        """torch.dtype of the KV cache."""
        return FP8_KV if self.kv_dtype == "fp8" else self.torch_dtype

    @property
    def torch_state_dtype(self) -> torch.dtype:
        """torch.dtype of the states of delta nets, which `state_dtype` names."""
        return _DTYPES[self.state_dtype]

    @property
    def torch_adapter_dtype(self) -> torch.dtype:
        """torch.dtype of the adapters' weights, which `adapter_dtype` names."""
        return _DTYPES[self.adapter_dtype]
