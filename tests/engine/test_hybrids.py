"""Whole engine over a hybrid of delta nets and attention: states change no token."""

import json
import shutil
from contextlib import closing
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import (
    AdapterLimits,
    BaseShape,
    read_config,
    read_spec,
    write_blob,
)
from lorikeet_engine.device.memory import MemoryShare
from lorikeet_engine.errors import AdapterRejected, SettingsError
from lorikeet_engine.execution.batch_builder import StateInput
from lorikeet_engine.execution.kv_tensors import allocate_states
from lorikeet_engine.execution.memory_plan import plan_memory
from lorikeet_engine.models.batch import StateRows
from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.scheduling.kv_cache import KVCache, StateUse
from lorikeet_engine.settings import EngineSettings
from lorikeet_engine.telemetry.status import StateUsage
from tests.engine.descending_grammar import DescendingGrammars
from tests.engine.engine_driver import (
    PAGE,
    Answers,
    RecordingRunner,
    build,
    greedy,
    nothing_is_held,
    prompt,
)
from tests.engine.modes import modes
from tests.engine.peft_adapters import save_adapter
from tests.engine.peft_world import PeftWorld, ask

CPU = torch.device("cpu")
HYBRID = "qwen3_5_text"
DELTA = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS = {
    "all": {"r": 4, "target_modules": "all-linear"},
    "attention": {"r": 3, "target_modules": ATTENTION},
    "delta net": {"r": 8, "target_modules": DELTA, "rank_pattern": {"in_proj_a": 2}},
    "gates": {"r": 5, "target_modules": ["q_proj", "in_proj_z", "in_proj_b"]},
    "z without qkv": {"r": 2, "target_modules": ["in_proj_z"], "use_rslora": True},
    "mlp": {"r": 6, "target_modules": ["gate_proj", "down_proj"]},
    "one layer": {"r": 4, "target_modules": [*DELTA, "up_proj"], "layers_to_transform": [2]},
    "head": {"r": 4, "target_modules": ["out_proj", "lm_head", "embed_tokens"]},
}


@pytest.fixture
def make(tiny_checkpoints, shelf, tmp_path, close_later):
    """Engines over the hybrid's tiny checkpoint, closed at the end."""

    def make(**settings):
        folder = tiny_checkpoints[HYBRID]
        return close_later(build(folder, shelf, tmp_path / "cache", **settings))

    return make


STATE = 4 * 4032 + 4128  # bytes of a sequence's state in the tiny checkpoint, in float32, and ring


def tokens_of(engine, prompts, **options):
    answers = Answers(engine)
    for i, ids in enumerate(prompts):
        answers.submit(greedy(f"{i}", ids, **options))
    answers.all()
    return answers.tokens


@pytest.mark.parametrize("tokens", [8, 64, 70])
def test_chunks_change_no_token(make, tokens):
    prompts = [prompt(length, length) for length in (200, 1, 63, 64, 65)]
    cut = make(max_batch_tokens=tokens, max_running=5)
    assert tokens_of(cut, prompts) == tokens_of(make(), prompts)


def test_preemption_changes_no_token(make):
    prompts = [prompt(70, seed) for seed in range(5)]
    tight = make(kv_pages=13, max_context=200)
    witness = RecordingRunner(tight)
    roomy = make()
    assert tokens_of(tight, prompts, max_tokens=30) == tokens_of(roomy, prompts, max_tokens=30)
    assert witness.tokens > 5 * 100, "somebody was computed twice"
    assert nothing_is_held(tight)


# Requests of every kind: forced tokens, draws, penalties, a bias, a stop token, choices.
KINDS = [
    {"grammar": "below 241, end under 1, by one from 240 to 200"},
    {"grammar": "below 191, end under 1, by one from 190 to 150", "temperature": 1.0, "seed": 4},
    {"temperature": 1.0, "seed": 7, "n": 3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.7, "temperature": 0.8, "top_p": 0.9, "seed": 2},
    {"logit_bias": ((7, 4.0), (9, -3.0)), "min_tokens": 14},
    {"stop_token_ids": tuple(range(3, 40)), "keep_stop_token": True, "min_tokens": 12},
]


def ask_every_kind(engine, world, *, together, names=(None, "all", "delta net", "gates"), **more):
    """Return all tokens of a request of each kind, under adapters in turn.

    names: names of the adapters.
    together: whether all are asked at once. more: further options of each request.
    """
    answers = Answers(engine)
    for i, kind in enumerate(KINDS):
        ref = world.refs[names[i % len(names)]]
        options = {"max_tokens": 24, **kind, **more}
        answers.submit(greedy(f"{i}", prompt(60 + 7 * i, i), adapter=ref, **options))
        if not together:
            answers.all()
    answers.all()
    assert not answers.errors
    assert nothing_is_held(engine)
    return answers


def engine_of_every_kind(world, folder, **settings):
    sizes = {"grammars": DescendingGrammars(), "max_running": 12, "max_batch_adapters": 8}
    return build(world.checkpoint, world.shelf, folder, **sizes | settings)


@pytest.fixture(scope="module")
def each_alone(world, tmp_path_factory):
    """Answers to requests of every kind, one after the other, token by token."""
    with closing(engine_of_every_kind(world, tmp_path_factory.mktemp("alone"))) as engine:
        # a log probability needs its token's step, so that no token is forced
        alone = ask_every_kind(engine, world, together=False, logprobs=0)
    assert {len(output.token_ids) for output in alone.outputs["0", 0]} == {1}
    return alone


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": True},
        {"overlap": False, "max_batch_tokens": 16},
        {"kv_pages": 14, "max_context": 200, "state_bytes": 40 * STATE},
    ],
    ids=["at once", "in chunks", "preempted"],
)
def test_requests_of_every_kind_answer_together_as_each_alone(
    world, each_alone, tmp_path, close_later, settings
):
    engine = close_later(engine_of_every_kind(world, tmp_path / "cache", **settings))
    together = ask_every_kind(engine, world, together=True)
    assert together.tokens == each_alone.tokens
    assert together.finish == each_alone.finish
    assert max(len(output.token_ids) for output in together.outputs["0", 0]) > 1
    assert (engine.status().preemptions > 0) == ("kv_pages" in settings)
    again = ask_every_kind(engine, world, together=True)
    assert again.tokens == each_alone.tokens
    assert engine.status().states.restored > 0


def test_choices_of_one_prompt_compute_it_once(make):
    engine = make()
    witness, ids = RecordingRunner(engine), prompt(200)
    answers = Answers(engine)
    answers.submit(greedy("many", ids, n=4, max_tokens=5))
    answers.all()
    (alone,) = tokens_of(make(), [ids], max_tokens=5).values()
    assert [answers.of("many", choice) for choice in range(4)] == [alone] * 4
    again = 200 - 192  # tokens behind the last state that is saved in the prompt
    assert witness.tokens == 200 + 3 * again + 4 * 4


def test_a_prompt_begins_behind_the_last_state_that_is_saved_in_its_prefix(make):
    engine = make()
    witness, system = RecordingRunner(engine), prompt(10 * PAGE)
    asked = [system + prompt(100, seed) for seed in (1, 2, 3)]
    computed = []
    for i, ids in enumerate(asked):
        before = witness.tokens
        answers = Answers(engine)
        answers.submit(greedy(f"{i}", ids, max_tokens=1))
        answers.all()
        computed.append(witness.tokens - before)
        assert answers.tokens == {(f"{i}", 0): tokens_of(make(), [ids], max_tokens=1)["0", 0]}
    # the second finds the pages alone, and saves a state where it parts from the first
    assert computed == [260, 260, 260 - 128]


def test_a_failed_step_spoils_no_state(make):
    engine = make()
    witness, ids = RecordingRunner(engine), prompt(150)
    first = tokens_of(engine, [ids])
    witness.error = RuntimeError("out of luck")
    answers = Answers(engine)
    answers.submit(greedy("failed", ids))
    answers.all()
    assert "failed" in answers.errors
    assert tokens_of(engine, [ids]) == first
    assert nothing_is_held(engine)


def test_states_are_found_under_the_same_salt_only(make):
    engine = make()
    witness, ids = RecordingRunner(engine), prompt(150)
    for salt, want in (("acme", 150), ("acme", 150 - 128), ("globex", 150)):
        before = witness.tokens
        answers = Answers(engine)
        answers.submit(greedy(salt, ids, max_tokens=1, salt=salt))
        answers.all()
        assert witness.tokens - before == want


def test_more_prompts_than_slots_evict_the_oldest_state(make):
    # three slots: two states are cached beside the running one
    engine = make(max_running=1, state_bytes=3 * STATE)
    witness = RecordingRunner(engine)

    def computed(seed):
        before = witness.tokens
        tokens_of(engine, [prompt(100, seed)], max_tokens=1)
        return witness.tokens - before

    assert [computed(seed) for seed in (1, 1, 2, 1, 3, 1, 2)] == [100, 36, 100, 36, 100, 36, 100]
    assert KVCache.state_piece == 64


SHARED = ["shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"]
MIXTURE = {
    "all": {"r": 4, "target_modules": "all-linear"},
    "shared expert": {"r": 3, "target_modules": [*SHARED, "shared_expert_gate"]},
    "weight of the shared expert": {"r": 2, "target_modules": ["shared_expert_gate", "q_proj"]},
    "experts": {
        "r": 4,
        "target_modules": ["in_proj_qkv"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "delta net": ADAPTERS["delta net"],
}
MIXTURES = {
    "qwen3_5_moe_text": MIXTURE,
    "qwen3_next": {
        "all": MIXTURE["all"],
        "shared expert": MIXTURE["shared expert"],
        "fused": {"r": 5, "target_modules": ["in_proj_qkvz", "in_proj_ba", "o_proj"]},
        "half": {"r": 5, "target_modules": ["in_proj_ba", "k_proj"], "layers_to_transform": [0, 1]},
    },
}


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request, tiny_checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    checkpoint = tiny_checkpoints[request.param]
    return PeftWorld(checkpoint, folder, MIXTURES[request.param], tokens=12, longer=29)


@pytest.mark.parametrize("settings", modes(16, 200, often=["on two ranks"]))
@pytest.mark.usefixtures("forked_followers")
def test_adapters_of_a_mixture_equal_peft_in_one_batch(mixture, tmp_path, close_later, settings):
    sizes = {"max_running": 9, "max_batch_adapters": 8, **settings}
    engine = close_later(build(mixture.checkpoint, mixture.shelf, tmp_path / "cache", **sizes))
    assert ask(mixture, Answers(engine)) == mixture.expected
    assert len({tuple(tokens) for tokens in mixture.expected.values()}) == len(mixture.names)


@pytest.fixture(scope="module")
def world(tiny_checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    return PeftWorld(tiny_checkpoints[HYBRID], folder, ADAPTERS, tokens=12, longer=29)


@pytest.mark.parametrize("settings", modes(24, 280))
@pytest.mark.usefixtures("forked_followers")
def test_adapters_equal_peft_in_one_batch(world, tmp_path, close_later, settings):
    engine = close_later(
        build(
            world.checkpoint,
            world.shelf,
            tmp_path / "cache",
            **{"max_running": 9, "max_batch_adapters": 8, **settings},
        )
    )
    assert ask(world, Answers(engine)) == world.expected
    assert len({tuple(tokens) for tokens in world.expected.values()}) == len(world.names)


@pytest.fixture(scope="module")
def shape(tiny_checkpoints):
    return shape_of(tiny_checkpoints[HYBRID])


def shape_of(checkpoint):
    return BaseShape.from_config(read_config(checkpoint))


def checked(folder, out, shape):
    """Make a folder's blob, and check it against the base model."""
    write_blob(folder, out)
    return read_spec(out, shape, AdapterLimits(max_rank=64, max_bytes=1 << 30))


@pytest.mark.parametrize("name", ["all", "attention", "delta net", "gates", "z without qkv"])
def test_no_folder_that_lacks_a_tensor_is_taken(world, tmp_path, name):
    check_every_tensor_is_needed(world, name, tmp_path)


@pytest.mark.parametrize("name", ["all", "shared expert"])
def test_no_folder_of_a_mixture_that_lacks_a_tensor_is_taken(mixture, tmp_path, name):
    check_every_tensor_is_needed(mixture, name, tmp_path)


def check_every_tensor_is_needed(world, name, tmp_path):
    """Check that a folder is refused without any of its tensors, and without any pair of them."""
    shape = shape_of(world.checkpoint)
    whole = load_file(world.folder / name / "adapter_model.safetensors")
    assert checked(world.folder / name, tmp_path / "whole", shape).linears
    folder = tmp_path / "folder"
    shutil.copytree(world.folder / name, folder)
    for tensor in whole:
        pair = {t for t in whole if t.startswith(tensor.partition(".lora_")[0] + ".")}
        for lost in ({tensor}, pair):
            kept = {t: value for t, value in whole.items() if t not in lost}
            save_file(kept, folder / "adapter_model.safetensors")
            with pytest.raises(AdapterRejected):
                checked(folder, tmp_path / "blob", shape)


def test_an_adapter_of_another_pattern_of_layers_is_refused_by_name(world, shape, tmp_path):
    other = replace(shape, kinds=(*shape.kinds[:3], shape.kinds[1], shape.kinds[4]))
    assert other.kinds != shape.kinds
    said = "layer 3 of the base model is attention and has no in_proj"
    with pytest.raises(AdapterRejected, match=said):
        checked(world.folder / "gates", tmp_path / "blob", other)
    folder = tmp_path / "folder"
    shutil.copytree(world.folder / "gates", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"] = None
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert checked(folder, tmp_path / "blob", shape).linears
    with pytest.raises(AdapterRejected, match="layer 3 of the base model is attention") as caught:
        checked(folder, tmp_path / "blob", other)
    assert caught.value.field == "model.layers.3.linear_attn.in_proj_b"


def test_an_adapter_of_a_model_without_delta_nets_is_refused(shape, tiny_checkpoints, tmp_path):
    folder = save_adapter(tiny_checkpoints["llama"], tmp_path / "llama", target_modules=ATTENTION)
    with pytest.raises(AdapterRejected, match="layer 0 of the base model is a gated delta net"):
        checked(folder, tmp_path / "blob", replace(shape, head_dim=8))


def test_a_sequence_begins_with_a_copied_state_and_its_ring_or_with_zeros(shape):
    states = allocate_states(shape, 4, torch.float32, CPU)
    tensors = (states.inputs, states.matrices, *states.ring)
    for each in tensors:
        each.copy_(torch.arange(1, 5).view(1, 4, *[1] * (each.dim() - 2)).expand_as(each))
    states.begin(StateRows(None, None, torch.tensor([0]), ((3, 2), (1, 3))))
    for each in tensors:
        assert each.flatten(2)[..., 0].tolist() == [[0, 2, 4, 2]] * 3


@pytest.mark.parametrize("order", permutations(range(4)))
def test_a_state_evicted_in_the_step_that_begins_with_it_is_read_first(order):
    """A sequence gets a copy of 5, whose slot the next gets; and so on, in any order of a step."""
    uses = [StateUse(6, 5, ()), StateUse(5, 4, ()), StateUse(4, 3, ()), StateUse(2, None, (), 3)]
    given = StateInput.of([uses[i] for i in order], [False] * 4, np.arange(5))
    slots = list(range(7))
    for source, slot in given.copies:
        slots[slot] = slots[source]
    assert slots == [0, 1, 2, 2, 3, 4, 5]


def test_the_plan_of_a_devices_memory_counts_states(tiny_checkpoints, tmp_path):
    folder = tiny_checkpoints[HYBRID]
    settings = EngineSettings(folder, tmp_path, max_running=4, kv_bytes=1 << 20)
    config = ModelConfig.from_folder(folder)
    plan = plan_memory(config, 0, replace(settings, state_bytes=9 * STATE + 5), 1 << 30)
    net = config.shape.recurrent
    each = 3 * (3 * net.convolved + net.value_heads * net.key_dim * net.value_dim)
    entry = net.key_heads * net.key_dim + net.value_heads * (net.value_dim + 1)
    rings = 3 * (4 * 3 * entry + net.value_heads * net.value_dim)  # float32, and counts of a byte
    assert 4 * each + rings == STATE  # float32, three layers
    assert (plan.states, plan.cached_states) == (9 * STATE, 4)  # four running, one to begin with
    assert plan.total == plan.slot_pool + plan.steps + plan.states + plan.kv
    half = replace(settings, state_dtype="bfloat16", state_bytes=9 * STATE)
    kept = 3 * 3 * net.convolved * 4 + rings  # in float32
    each = kept + (STATE - kept) // 2
    assert plan_memory(config, 0, half, 1 << 30).cached_states == 9 * STATE // each - 5


def test_states_and_kv_pages_share_the_memory_that_is_left(tiny_checkpoints, tmp_path):
    """One state is cached for 2,048 tokens of KV pages, whether KV has bytes or a share."""
    config = ModelConfig.from_folder(tiny_checkpoints[HYBRID])
    settings = EngineSettings(tiny_checkpoints[HYBRID], tmp_path, max_running=4)
    for kv_bytes in (64 << 20, MemoryShare(0.9), MemoryShare(0.25)):
        for dtype in ("float32", "bfloat16"):
            chosen = replace(settings, kv_bytes=kv_bytes, state_dtype=dtype)
            plan = plan_memory(config, 0, chosen, 1 << 30)
            assert plan.cached_states == pytest.approx(plan.kv_tokens / 2048, abs=1)
            assert plan.cached_states > 10
            left = (1 << 30) - plan.slot_pool - plan.steps - plan.states
            if isinstance(kv_bytes, MemoryShare):
                assert plan.kv == pytest.approx(kv_bytes.of_free * left, rel=1e-3)
            assert plan.kv <= left


def test_no_state_is_cached_where_the_longest_sequence_needs_the_memory(tiny_checkpoints, tmp_path):
    config = ModelConfig.from_folder(tiny_checkpoints[HYBRID])
    settings = EngineSettings(
        tiny_checkpoints[HYBRID], tmp_path, max_running=4, max_context=512, kv_bytes=MemoryShare(1)
    )
    parts = plan_memory(config, 0, settings, 1 << 30)
    needed = parts.slot_pool + parts.steps + 5 * STATE + parts.kv_of_longest
    plan = plan_memory(config, 0, settings, needed)
    assert (plan.cached_states, plan.kv) == (0, plan.kv_of_longest)


@pytest.mark.parametrize("given", [None, 5 * STATE - 1, 1 << 40, MemoryShare(1e-6)])
def test_states_of_too_many_sequences_are_refused_with_a_remedy(tiny_checkpoints, tmp_path, given):
    config = ModelConfig.from_folder(tiny_checkpoints[HYBRID])
    settings = EngineSettings(tiny_checkpoints[HYBRID], tmp_path, max_running=4, kv_bytes=1 << 20)
    plan = plan_memory(config, 0, settings, 1 << 30)
    free = plan.slot_pool + plan.steps + 5 * STATE - 1 if given is None else 1 << 30
    with pytest.raises(SettingsError, match="max_running=4 needs 5") as caught:
        plan_memory(config, 0, replace(settings, state_bytes=given), free)
    assert caught.value.field == "max_running"
    assert "lower max_running" in caught.value.message


def test_as_many_sequences_as_max_running_run_where_no_state_can_be_cached(make):
    engine = make(max_running=3, state_bytes=4 * STATE)
    answers = Answers(engine)
    for seed in range(3):
        answers.submit(greedy(f"{seed}", prompt(120, seed), max_tokens=20))
    running = []
    while answers.pending:
        answers.step()
        running.append(engine.status().live.running)
    assert max(running) == 3
    assert engine._cache.states.cached == 0
    assert nothing_is_held(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_turn_of_a_chat_begins_near_the_end_of_the_answer(make, overlap):
    engine = make(overlap=overlap, max_running=8, state_bytes=20 * STATE)
    witness, ids = RecordingRunner(engine), prompt(100)
    for turn, cached in ((1, 0), (2, 128)):
        before = witness.tokens
        (answer,) = tokens_of(engine, [ids], max_tokens=40).values()
        computed = witness.tokens - before
        assert computed == len(ids) - cached + 39
        assert answer == tokens_of(make(), [ids], max_tokens=40)["0", 0]
        ids = ids + answer + prompt(30, turn)


def test_the_status_counts_states_that_are_used_saved_restored_and_evicted(make):
    engine, ids = make(max_running=1, state_bytes=3 * STATE), prompt(100)
    assert engine.status().states == StateUsage(0, 0, 3, STATE, 0, 0, 0)
    answers = Answers(engine)
    answers.submit(greedy("0", ids, max_tokens=5))
    answers.until(lambda: answers.tokens)
    assert engine.status().states == StateUsage(1, 1, 3, STATE, 0, 1, 0)
    answers.all()
    for seed, counts in ((None, (1, 1, 0)), (1, (1, 2, 0)), (2, (1, 3, 1)), (3, (1, 4, 2))):
        tokens_of(engine, [ids if seed is None else prompt(100, seed)], max_tokens=1)
        assert engine.status().states[4:] == counts
    assert engine.status().states.running == 0


def test_a_model_without_delta_nets_has_no_states(tiny_checkpoints, shelf, tmp_path, close_later):
    engine = close_later(build(tiny_checkpoints["llama"], shelf, tmp_path / "cache"))
    assert engine.status().states is None


def test_an_answer_of_any_length_leaves_one_state_beside_its_prompts(make):
    engine = make(state_bytes=20 * STATE, max_running=2)
    tokens_of(engine, [prompt(100)], max_tokens=50)
    assert engine._cache.states.cached == 2
    tokens_of(engine, [prompt(100, 2)], max_tokens=100)
    assert engine._cache.states.cached == 4


def test_states_in_bfloat16_are_as_large_as_planned_and_give_the_same_tokens_on_all_paths(make):
    half = {"state_dtype": "bfloat16", "state_bytes": 9 * STATE, "max_running": 8}
    engine, ids = make(**half), prompt(150)
    assert engine._runner._states.matrices.dtype == torch.bfloat16
    first = tokens_of(engine, [ids], max_tokens=20)
    assert tokens_of(make(**half), [ids], max_tokens=20) == first
