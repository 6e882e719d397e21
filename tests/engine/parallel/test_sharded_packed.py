"""A model of 4 bits that ranks share gives the logits of one process."""

from pathlib import Path

import pytest
import torch

from lorikeet_engine.errors import ModelError
from lorikeet_engine.models.llama import load_model, rehearse_load
from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.parallel.shard import Shard
from tests.engine.conftest import FAMILIES, HYBRID, PagedTokens, save_all
from tests.engine.models.quantized_checkpoints import INT4, write_int4
from tests.engine.models.test_models import Run, assert_equal, prompt_of
from tests.engine.ranks import CPU, run_ranks

WIDE = {"intermediate_size": 128, "linear_value_head_dim": 16}
CONFIGS = {
    "llama": FAMILIES["llama"] | WIDE,
    "phi3": FAMILIES["phi3"] | WIDE,
    "qwen3_5_text": HYBRID["qwen3_5_text"] | WIDE,
}


def answers(group: RankGroup | None, folders: dict[str, Path]) -> dict[str, torch.Tensor]:
    """Each model's logits of all tokens of a prompt."""
    logits = {}
    for name, folder in folders.items():
        model = load_model(folder, CPU, torch.float32, ranks=group, packed=True)
        run = Run(folder, PagedTokens(), model=model)
        logits[name] = run.runner.forward(run.tokens.batch({"a": prompt_of(40)}))
    return logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = save_all(CONFIGS, tmp_path_factory.mktemp("models"))
    target = tmp_path_factory.mktemp("packed")
    return {
        name: write_int4(folder, target / name, "w4a16", **INT4["w4a16"])[0]
        for name, folder in made.items()
    }


def test_the_leaders_logits_equal_one_process(folders, tmp_path):
    alone = answers(None, folders)
    leader, follower = run_ranks(2, answers, tmp_path, folders)
    for name in CONFIGS:
        assert_equal(leader[name], alone[name])
        assert len(follower[name]) == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_a_rank_has_its_part_of_packed_weights(folders, name):
    whole, *parts = (
        rehearse_load(folders[name], torch.float32, shard=shard, packed=True)[1]
        for shard in (Shard(), Shard(0, 2), Shard(1, 2))
    )
    assert whole <= sum(parts) < 1.7 * whole
    assert parts[0] >= parts[1]


def test_ranks_that_would_share_bytes_of_weights_are_refused(folders):
    with pytest.raises(ModelError, match=r"divided among GPUs in 4 bits.*another number") as said:
        rehearse_load(folders["llama"], torch.float32, shard=Shard(1, 4), packed=True)
    assert said.value.field == "weight_dtype"
