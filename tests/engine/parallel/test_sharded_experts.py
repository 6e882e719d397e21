"""A mixture of experts that ranks share: all choose the same experts, and sum up once a layer."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lorikeet_engine.adapter_format import BaseShape, read_config
from lorikeet_engine.kernels.moe import route
from lorikeet_engine.kernels.routed_rows import RoutedRows
from lorikeet_engine.models import experts
from lorikeet_engine.models.llama import load_model
from lorikeet_engine.parallel.rank_group import RankGroup
from tests.engine.blob_shelf import BlobShelf
from tests.engine.conftest import EIGHT_HEADS, MOE, PagedTokens, save_all
from tests.engine.models.test_models import Run, prompt_of
from tests.engine.moe_adapters import PARAMETERS, save_shared
from tests.engine.parallel.test_sharded_adapters import packed, step
from tests.engine.peft_adapters import save_adapter
from tests.engine.ranks import CPU, run_ranks

ADAPTERS = ("router", "both", "all")


class Told(NamedTuple):
    """Results of one rank. routed: by layer. sums: number of sums over ranks."""

    logits: torch.Tensor
    routed: list[RoutedRows]
    sums: int


def tell(group: RankGroup | None, checkpoint: Path, blobs: dict[str, Path]) -> Told:
    """Run one step of a prompt under each adapter and one of the base model."""
    routed, sums = list[RoutedRows](), list[int]()

    def recording_route(*arguments, **more):
        routed.append(route(*arguments, **more))
        return routed[-1]

    experts.route = recording_route
    try:
        model = load_model(checkpoint, CPU, torch.float32, ranks=group)
        if group is not None:
            all_reduce = group.sums.all_reduce
            group.sums.all_reduce = lambda tensor: sums.append(1) or all_reduce(tensor)
        weights, layouts = packed(model, blobs, group)
        run = Run(checkpoint, PagedTokens(), lora=weights, model=model)
        prompts = {name: prompt_of(9 + 7 * n, n) for n, name in enumerate([*blobs, None])}
        return Told(step(run, prompts, layouts), routed, len(sums))
    finally:
        experts.route = route


@pytest.fixture(scope="module", params=MOE)
def case(request, tiny_checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return made_case(tiny_checkpoints[request.param], folder)


def made_case(checkpoint: Path, folder: Path) -> tuple[Path, dict[str, Path]]:
    """A checkpoint, and the blobs of adapters that change what is routed."""
    shelf = BlobShelf(folder / "blobs")
    blobs = {}
    for seed, name in enumerate(ADAPTERS):
        saved = save_adapter(checkpoint, folder / name, seed, **parameters_of(checkpoint, name))
        blobs[name] = shelf.folder / shelf.add(saved, name).digest
    shared = shelf.add(save_shared(checkpoint, folder / "shared", rank=3), "shared")
    return checkpoint, blobs | {"shared": shelf.folder / shared.digest}


def shape_of(checkpoint: Path) -> BaseShape:
    return BaseShape.from_config(read_config(checkpoint))


def parameters_of(checkpoint: Path, name: str) -> dict[str, Any]:
    """PARAMETERS[name], with the names of Gemma 4's router and experts if it is the base model."""
    parameters = PARAMETERS[name]
    if shape_of(checkpoint).family != "gemma4_moe_text":
        return parameters
    if name == "router":
        return parameters | {"target_modules": ["proj"]}
    paths = [path.removeprefix("mlp.") for path in parameters.get("target_parameters", ())]
    return parameters | {"target_parameters": paths}


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_choose_the_same_experts_bit_for_bit_and_sum_parts_once(world, case, tmp_path):
    all_choose_the_same(world, case, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", MOE)
def test_eight_ranks_choose_the_same_experts(name, tmp_path):
    (checkpoint,) = save_all({name: MOE[name] | EIGHT_HEADS}, tmp_path).values()
    all_choose_the_same(8, made_case(checkpoint, tmp_path), tmp_path)


def all_choose_the_same(world: int, case: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    alone = tell(None, *case)
    leader, *followers = run_ranks(world, tell, tmp_path, *case)
    torch.testing.assert_close(leader.logits, alone.logits, rtol=0, atol=1e-4)
    shape = shape_of(case[0])
    assert len(leader.routed) == shape.layers
    for ours, whole in zip(leader.routed, alone.routed, strict=True):
        assert torch.equal(ours.pairs, whole.pairs)
    for rank in followers:
        for ours, theirs in zip(rank.routed, leader.routed, strict=True):
            assert torch.equal(ours.weights, theirs.weights)
            assert torch.equal(ours.pairs, theirs.pairs)
    # behind attention and experts, and behind an MLP beside the experts
    sums = 3 if shape.family == "gemma4_moe_text" else 2
    assert {rank.sums for rank in (leader, *followers)} == {sums * shape.layers}
