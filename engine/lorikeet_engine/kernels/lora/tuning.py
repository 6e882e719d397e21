"""How the Triton kernels are launched, by regime and GPU: read from tuning.json.

`loadtest/engine/tune_lora.py` writes that file's entry of the GPU it runs on; a GPU without one
gets "default".

A step is in one of three regimes:

few      at most FEW_TOKENS tokens an adapter. The weights are nearly all that is read, each for a
         token or two: expand multiplies and sums in registers, a program's weights in one burst.
dense    more tokens an adapter: tensor cores, tiles of 16 tokens, so that weights are read once.
prefill  more tokens than a decode ever has: activations outweigh the weights, so tiles are larger
         and one program takes all of a fused linear's ranks, that x may be read once.
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
    """Which launch config a step takes; the module says what each is for."""

    FEW = "few"
    DENSE = "dense"
    PREFILL = "prefill"

    @classmethod
    def of(cls, tokens: int, segments: int) -> "Regime":
        """The regime of a step; both counts may be those of a padded graph."""
        if tokens > PREFILL_TOKENS:
            return cls.PREFILL
        return cls.FEW if tokens <= FEW_TOKENS * segments else cls.DENSE


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """How shrink is launched.

    columns: of v, for one program; wide_columns: the same for an adapter of more ranks. block_in:
    columns of x, read at once. programs: as many as should run; d_in is split until they do.
    """

    columns: int
    wide_columns: int
    block_in: int
    programs: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """How expand is launched. columns: of the output, computed at once.

    blocks: of N columns, taken by one program in turn.
    """

    columns: int
    blocks: int
    warps: int


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How the kernels of one regime are launched.

    tokens: in a tile. lora_sms: pairs of ranks and multiprocessors, which sms_for_lora looks up.
    """

    tokens: int
    lora_sms: tuple[tuple[int, int], ...]
    shrink: ShrinkConfig
    expand: ExpandConfig

    @classmethod
    def parse(cls, entry: dict[str, Any]) -> "LaunchConfig":
        """Read an entry of tuning.json."""
        shrink, expand = ShrinkConfig(**entry["shrink"]), ExpandConfig(**entry["expand"])
        lora_sms = tuple((int(ranks), count) for ranks, count in entry["lora_sms"].items())
        return cls(entry["tokens"], lora_sms, shrink, expand)

    def entry(self) -> dict[str, Any]:
        """Return the entry of tuning.json that parse makes this from."""
        return asdict(self) | {"lora_sms": {str(ranks): count for ranks, count in self.lora_sms}}

    def sms_for_lora(self, ranks: int) -> int:
        """How many multiprocessors the base model's product leaves free for LoRA.

        ranks: of all segments together, at most; some 2,900 of them weigh as much as an 8B model.
        0: LoRA goes first, and the product has what LoRA does not use.
        """
        return [count for least, count in self.lora_sms if ranks >= least][-1]


@cache
def launch_config(regime: Regime, device: torch.device) -> LaunchConfig:
    """Return the launch config for this GPU, or the default."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "default"
    entries = json.loads(PATH.read_text())
    return LaunchConfig.parse(entries.get(gpu, entries["default"])[regime])
