"""Launch parameters of the LoRA kernels, by regime and GPU, read from tuning.json.

`loadtest/engine/tune_lora.py` writes the entry of the GPU that it runs on; a GPU without an entry
gets "default".

A step is in one of three regimes:

few      at most FEW_TOKENS tokens an adapter. Nearly all reads are weights, each for a token or
         two: an `expand` program loads its weights at once, and multiplies and sums in registers.
dense    more tokens an adapter: tensor cores, tiles of 16 tokens, so that weights are read once.
prefill  more tokens than any decode: activations outweigh weights, so tiles are larger, and one
         program takes all ranks of a fused linear, so that x is read once.
"""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import torch

PATH = Path(__file__).with_name("tuning.json")
FEW_TOKENS = 2
# Above every captured decode step; from about here on the base model's products are bound by
# arithmetic and not by their weights.
PREFILL_TOKENS = 512


class Regime(StrEnum):
    """Regime of a step, which selects launch parameters.

    FEW: at most FEW_TOKENS tokens for each adapter, on average.
    DENSE: more tokens for each adapter, but no prefill.
    PREFILL: more than PREFILL_TOKENS tokens, more than any captured decode step.
    """

    FEW = "few"
    DENSE = "dense"
    PREFILL = "prefill"

    @classmethod
    def of(cls, tokens: int, segments: int) -> "Regime":
        """Return the regime of a step with this many tokens and segments.

        Both counts may include the padding of a CUDA graph.
        """
        if tokens > PREFILL_TOKENS:
            return cls.PREFILL
        return cls.FEW if tokens <= FEW_TOKENS * segments else cls.DENSE


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """Launch parameters of `shrink`, the kernel of v = A·x.

    columns: columns of v for one program.
    wide_columns: columns of v for one program if the adapter has more ranks than `columns`.
    block_in: columns of x read at once.
    programs: number of programs to aim for when d_in is split among programs.
    warps: number of warps of a program.
    stages: number of tiles that are loaded at the same time.
    """

    columns: int
    wide_columns: int
    block_in: int
    programs: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """Launch parameters of `expand`, the kernel of B·v.

    columns: columns of the output that a program computes at once.
    blocks: blocks of `columns` columns that a program computes one after the other.
    warps: number of warps of a program.
    """

    columns: int
    blocks: int
    warps: int


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Launch parameters of all LoRA kernels in one regime.

    tokens: maximum number of tokens of a tile.
    shrink, expand: launch parameters of the two kernels.
    lora_sms: pairs (sum of ranks, number of multiprocessors left free for LoRA from this sum on),
        in ascending order.
    """

    tokens: int
    lora_sms: tuple[tuple[int, int], ...]
    shrink: ShrinkConfig
    expand: ExpandConfig

    @classmethod
    def parse(cls, entry: dict[str, Any]) -> "LaunchConfig":
        """Read an entry of tuning.json, the launch parameters of one regime on one GPU."""
        shrink, expand = ShrinkConfig(**entry["shrink"]), ExpandConfig(**entry["expand"])
        lora_sms = tuple((int(ranks), count) for ranks, count in entry["lora_sms"].items())
        return cls(entry["tokens"], lora_sms, shrink, expand)

    def entry(self) -> dict[str, Any]:
        """Return these launch parameters as an entry of tuning.json, the inverse of `parse`."""
        return asdict(self) | {"lora_sms": {str(ranks): count for ranks, count in self.lora_sms}}

    def sms_for_lora(self, ranks: int) -> int:
        """Return the number of multiprocessors that the base model's product leaves free for LoRA.

        0: LoRA is launched first, and the product gets the multiprocessors that LoRA leaves.

        ranks: upper bound of the sum of all segments' ranks.
        """
        return [count for least, count in self.lora_sms if ranks >= least][-1]


@cache
def launch_config(regime: Regime, device: torch.device) -> LaunchConfig:
    """Return tuning.json's launch parameters for a regime on this GPU, or its default ones."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "default"
    entries = json.loads(PATH.read_text())
    return LaunchConfig.parse(entries.get(gpu, entries["default"])[regime])
