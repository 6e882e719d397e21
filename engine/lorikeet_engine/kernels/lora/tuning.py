"""How the Triton kernels cut their work, by regime and GPU: read from tuning.json.

`engine/benchmarks/tune_lora.py` writes that file's entry of the GPU it runs on; a GPU without one
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
    """Which of the cuts above a step takes."""

    FEW = "few"
    DENSE = "dense"
    PREFILL = "prefill"

    @classmethod
    def of(cls, tokens: int, segments: int) -> "Regime":
        """Of a step; both counts may be those of a padded graph."""
        if tokens > PREFILL_TOKENS:
            return cls.PREFILL
        return cls.FEW if tokens <= FEW_TOKENS * segments else cls.DENSE


@dataclass(frozen=True, slots=True)
class ShrinkCut:
    """columns: of v, for one program; wide: the same for an adapter of more ranks; inner: of x,
    read at once; programs: as many as should run: into so many parts d_in is split.
    """

    columns: int
    wide: int
    inner: int
    programs: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class ExpandCut:
    """columns: of the output, computed at once; blocks of them: taken by one program in turn."""

    columns: int
    blocks: int
    warps: int


@dataclass(frozen=True, slots=True)
class Cut:
    """tokens: in a tile. left: pairs of ranks and multiprocessors, as left_to_lora reads them."""

    tokens: int
    left: tuple[tuple[int, int], ...]
    shrink: ShrinkCut
    expand: ExpandCut

    @classmethod
    def parse(cls, entry: dict[str, Any]) -> "Cut":
        """From an entry of tuning.json."""
        shrink, expand = ShrinkCut(**entry["shrink"]), ExpandCut(**entry["expand"])
        left = tuple((int(ranks), count) for ranks, count in entry["left"].items())
        return cls(entry["tokens"], left, shrink, expand)

    def entry(self) -> dict[str, Any]:
        """The entry of tuning.json that parse makes this from."""
        return asdict(self) | {"left": {str(ranks): count for ranks, count in self.left}}

    def left_to_lora(self, ranks: int) -> int:
        """How many multiprocessors the base model's product leaves free.

        ranks: of all segments together, at most; some 2,900 of them weigh as much as an 8B model.
        0: LoRA goes first, and the product has what LoRA does not use.
        """
        return [count for least, count in self.left if ranks >= least][-1]


@cache
def cut_of(regime: Regime, device: torch.device) -> Cut:
    """The cut for this GPU."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "default"
    entries = json.loads(PATH.read_text())
    return Cut.parse(entries.get(gpu, entries["default"])[regime])
