"""Parts of a base model that each process keeps: whole heads, even parts, or a refusal by name."""

import dataclasses

import pytest

from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.errors import SettingsError
from lorikeet_engine.parallel.shard import Shard

SHAPE = BaseShape(
    "llama", 1, hidden=18, intermediate=32, heads=4, kv_heads=4, head_dim=4, vocabulary=40
)
OF_EXPERTS = dataclasses.replace(SHAPE, family="qwen3_moe", experts=6)


def test_the_key_head_of_every_query_head_is_in_the_same_shard():
    for heads, kv_heads, world in [(8, 2, 2), (8, 2, 4), (8, 2, 8), (32, 8, 16), (6, 3, 6)]:
        shape = BaseShape("llama", 1, 96, 96, heads, kv_heads, head_dim=1, vocabulary=96)
        for index in range(world):
            q, k, v, *_ = Shard(index, world).ranges(shape)
            read = {head * kv_heads // heads for run in q.outputs for head in run}
            assert [read] == [*map(set, k.outputs)] == [*map(set, v.outputs)]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize(("family", "experts"), [("llama", 0), ("qwen3_moe", 6), ("mixtral", 3)])
def test_a_shards_own_shape_has_the_widths_of_its_parts(family, experts, world):
    shape = BaseShape(
        family, 3, 96, 64, heads=8, kv_heads=2, head_dim=4, vocabulary=96, experts=experts
    )
    for index in range(world):
        own = Shard(index, world).part_of(shape)
        ranges = Shard(index, world).ranges(shape)
        for linear in range(len(shape.linears)):
            assert own.dims(linear) == ranges[linear].dims


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("group", ["qkv", "gate_up"])
def test_a_linear_that_stores_several_is_cut_as_each_of_them(world, group):
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 4, "vocabulary": 96}
    apart, fused = (BaseShape(name, 1, 96, 64, **sizes) for name in ("llama", "phi3"))
    for index in range(world):
        (of_fused,) = fused.groups[group]
        shard, want, begin = Shard(index, world), [], 0
        for linear in apart.groups[group]:
            (run,) = shard.ranges(apart)[linear].outputs
            want += [begin + output for output in run]
            begin += apart.dims(linear)[1]
        kept = shard.ranges(fused)[of_fused]
        assert [output for run in kept.outputs for output in run] == want
        assert kept.d_out == len(want)


@pytest.mark.parametrize(("size", "world"), [(27, 4), (40, 4), (49155, 2), (9, 8), (128256, 8)])
def test_the_vocabulary_is_cut_into_ranges_and_the_first_is_the_longest(size, world):
    runs = [Shard(index, world).vocabulary(size) for index in range(world)]
    assert [token for run in runs for token in run] == list(range(size))
    assert len(runs[0]) == max(map(len, runs))
    assert len(runs[0]) % 8 == 0


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("heads", 6, "num_attention_heads=6"),
        ("kv_heads", 3, "num_key_value_heads=3"),
        ("intermediate", 30, "intermediate_size=30"),
    ],
)
def test_a_base_model_that_cannot_be_cut_evenly_is_refused(field, value, named):
    other = dataclasses.replace(SHAPE, **{field: value})
    Shard(0, 4).ranges(SHAPE)
    Shard(0, 1).ranges(other)
    with pytest.raises(SettingsError, match=named):
        Shard(0, 4).ranges(other)


@pytest.mark.parametrize(
    ("family", "named"),
    [("qwen3_moe", "moe_intermediate_size=30"), ("mixtral", "^intermediate_size=30")],
)
def test_experts_that_cannot_be_cut_evenly_are_refused_by_the_key_of_their_width(family, named):
    uneven = dataclasses.replace(OF_EXPERTS, family=family, intermediate=30)
    with pytest.raises(SettingsError, match=f"{named} cannot .* choose a number of GPUs that"):
        Shard(0, 4).ranges(uneven)
