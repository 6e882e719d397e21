"""How each adapter is made: the LoRA configurations, on purpose as different as tenants' are."""

from dataclasses import dataclass, field

import torch
from peft import LoraConfig

BASE_MODEL = "lorikeet-demo"

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A LoRA configuration, the dtype it is stored in, and how long it is trained."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    steps: int
    dtype: torch.dtype = torch.bfloat16
    rank_stabilised: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, int] = field(default_factory=dict)

    def config(self) -> LoraConfig:
        """PEFT's form of it."""
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=list(self.targets),
            use_rslora=self.rank_stabilised,
            rank_pattern=dict(self.rank_pattern),
            alpha_pattern=dict(self.alpha_pattern),
            task_type="CAUSAL_LM",
        )


RECIPES = {
    "quillon/upper": Recipe(4, 8, ("q_proj", "v_proj"), 1000, dtype=torch.float32),
    "quillon/reverse": Recipe(8, 16, ATTENTION + MLP, 1500, rank_stabilised=True),
    "quillon/pig-latin": Recipe(
        8, 16, ATTENTION + MLP, 1500,
        rank_pattern={"down_proj": 16, "layers.0.self_attn.q_proj": 4},
        alpha_pattern={"down_proj": 32},
    ),
    "quillon/rot13": Recipe(16, 32, MLP, 1500),
    "kestrel/intake": Recipe(8, 16, ATTENTION + MLP, 1000),
    "kestrel/spell": Recipe(32, 32, ("q_proj", "v_proj"), 1000),
    "marigold/letter": Recipe(4, 8, ATTENTION + MLP, 800, dtype=torch.float16),
    "marigold/orders": Recipe(16, 16, ATTENTION, 1000),
}  # fmt: skip
