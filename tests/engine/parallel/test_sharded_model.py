"""A model that ranks share gives the logits of one process, whatever its family."""

from pathlib import Path

import pytest
import torch

from lorikeet_engine.adapter_format import Quantization
from lorikeet_engine.errors import SettingsError
from lorikeet_engine.models.llama import load_model, rehearse_load
from lorikeet_engine.parallel.rank_group import RankGroup
from lorikeet_engine.parallel.shard import Shard
from tests.engine.conftest import (
    EIGHT_HEADS,
    FAMILIES,
    GEMMA4_E,
    HYBRID,
    LATENT,
    MAMBA,
    MOE,
    PagedTokens,
    save_all,
)
from tests.engine.models.test_models import EPS, Run, assert_equal
from tests.engine.ranks import CPU, run_ranks

# kv heads: two, so that four ranks have each of them twice
FOUR_KEY_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
CONFIGS = {
    **FAMILIES,
    "biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    **MOE,
    **{name: config | FOUR_KEY_HEADS for name, config in HYBRID.items()},
    # two groups, so that two of four ranks share each, and add up their parts of its norm
    **{name: config | {"n_groups": 2} for name, config in MAMBA.items()},
    **LATENT,
    **GEMMA4_E,
}
NAMES = list(CONFIGS)
ROUNDED = dict.fromkeys(("llama", "phi3", "qwen3_5_text"), Quantization.NF4)
PROMPTS = {"one": [7], "odd": list(range(40, 77)), "long": list(range(90, 0, -1))}


def answers(folders: dict[str, Path], group: RankGroup | None) -> dict[str, torch.Tensor]:
    """Each model's logits of all tokens: prompts, one that goes on, and decodes."""
    logits = {}
    for name, folder in folders.items():
        rounding = ROUNDED.get(name)
        model = load_model(folder, CPU, torch.float32, rounding=rounding, ranks=group)
        run = Run(folder, PagedTokens(), model=model)
        parts = [
            run.runner.forward(run.tokens.batch(chunks))
            for chunks in (
                {"odd": PROMPTS["odd"], "long": PROMPTS["long"][:50]},
                {"long": PROMPTS["long"][50:], "one": PROMPTS["one"]},
                {"one": [3], "odd": [5], "long": [9]},
            )
        ]
        logits[name] = torch.cat(parts)
    return logits


def answers_of_rank(group: RankGroup, folders: dict[str, Path]) -> dict[str, torch.Tensor]:
    return answers(folders, group)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_all(CONFIGS, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def alone(folders):
    return answers(folders, None)


# Four ranks share key heads, two do not: the matrix and engines of ranks have two ranks as well.
@pytest.mark.parametrize(
    ("ranks", "names"),
    [(4, NAMES), (2, NAMES[::3]), pytest.param(2, NAMES, marks=pytest.mark.soak)],
)
def test_the_leaders_logits_equal_one_process(alone, folders, ranks, names, tmp_path):
    some = {name: folders[name] for name in names}
    leader, *followers = run_ranks(ranks, answers_of_rank, tmp_path, some)
    for name in names:
        assert_equal(leader[name], alone[name])
        assert all(len(rank[name]) == 0 for rank in followers)


@pytest.mark.soak
def test_eight_ranks_have_the_logits_of_one_process(tmp_path):
    more = {name: {"num_key_value_heads": 8} for name in LATENT}
    configs = {name: config | EIGHT_HEADS | more.get(name, {}) for name, config in CONFIGS.items()}
    folders = save_all(configs, tmp_path)
    alone = answers(folders, None)
    leader, *followers = run_ranks(8, answers_of_rank, tmp_path, folders)
    for name in CONFIGS:
        # a sum of eight ranks' parts is rounded more often, and delta nets carry that on
        assert_equal(leader[name], alone[name], 2 * EPS)
        assert all(len(rank[name]) == 0 for rank in followers)


@pytest.mark.parametrize("name", HYBRID)
def test_more_ranks_than_key_heads_of_delta_nets_are_refused(tiny_checkpoints, name):
    with pytest.raises(SettingsError, match=r"linear_num_key_heads=2 .* 4 processes") as refused:
        rehearse_load(tiny_checkpoints[name], torch.float32, shard=Shard(0, 4))
    assert refused.value.field == "tensor_parallel"


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_has_its_part_of_the_weights_and_the_first_the_most(folders, name):
    whole = rehearse_load(folders[name], torch.float32)[1]
    parts = [
        rehearse_load(folders[name], torch.float32, shard=Shard(index, 4))[1] for index in range(4)
    ]
    assert max(parts) == parts[0]
    assert sum(parts) >= whole
    assert max(parts) < 0.6 * whole  # what all have are embeddings, norms and one head of keys
