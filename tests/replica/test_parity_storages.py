"""Parity proofs on two ranks, on a base model in 4 bits and on a mixture: a sound adapter is
accepted, and a planted fault found with its cause.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lorikeet.parity.figures import GapCause, Verdict
from lorikeet_engine.models.weight_formats.nf4 import round_to_nf4
from lorikeet_engine.parallel import followers
from tests.engine import forked_followers
from tests.engine.conftest import TinyCheckpoints
from tests.engine.moe_adapters import BOTH
from tests.engine.peft_adapters import save_adapter
from tests.replica.parity_world import ParityWorld, Trainer
from tests.replica.test_parity import WHOLE

EXPERTS: dict[str, Any] = {"target_modules": ["q_proj", "o_proj"], "target_parameters": BOTH}


def leave(trainer: Trainer) -> None:
    """Do nothing: the replica serves floats."""


def round_base(trainer: Trainer) -> None:
    """Round the trainer's linears as bitsandbytes does."""
    for name, module in trainer.model.named_modules():
        if name.endswith("_proj.base_layer"):
            module.weight.data = round_to_nf4(module.weight.data)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Callable[[Trainer], None]]] = {
    "two_ranks": ("llama", {"tensor_parallel": 2}, WHOLE, leave),
    "four_bits": ("llama", {"weight_dtype": "nf4"}, WHOLE, round_base),
    "mixture": ("qwen3_moe", {}, EXPERTS | {"r": 4, "lora_alpha": 9}, leave),
}
"""Family, engine's settings, LoraConfig's arguments and the trainer's storage, by name."""


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(followers, "_start", forked_followers.start)
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES)
def test_a_proof_accepts_a_sound_adapter_and_names_a_fault(case: str, tmp_path: Path) -> None:
    family, settings, lora, store = CASES[case]
    base = TinyCheckpoints(tmp_path / "models")[family]
    adapter = save_adapter(base, tmp_path / "adapter", 1, **lora)
    trainer = Trainer(base, adapter)
    store(trainer)
    probes = trainer.probes()
    world = ParityWorld(base, tmp_path, **settings)
    try:
        sound = world.prove(adapter, probes)
        assert sound.verdict is Verdict.ACCEPTED
        assert sound.mean < 1e-4
        config = adapter / "adapter_config.json"
        said = json.loads(config.read_text())
        config.write_text(json.dumps(said | {"lora_alpha": 2 * said["lora_alpha"]}))
        doubled = world.prove(adapter, probes)
        assert doubled.verdict is not Verdict.ACCEPTED
        assert doubled.cause is GapCause.SCALING
    finally:
        world.engine.close()
