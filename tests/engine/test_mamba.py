"""Whole engine over models with Mamba 2: adapters equal PEFT's, and states change no token."""

import json
import shutil

import peft
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
from lorikeet_engine.errors import AdapterRejected
from tests.engine.engine_driver import Answers, RecordingRunner, build, greedy, prompt
from tests.engine.modes import in_worlds, modes
from tests.engine.peft_world import PeftWorld, ask
from tests.engine.test_hybrids import ask_every_kind, engine_of_every_kind

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.up_proj", "experts.down_proj"]
LATENT = ["fc1_latent_proj", "fc2_latent_proj"]
ADAPTERS = {
    "all": {"r": 4, "target_modules": "all-linear"},
    "default": {"r": 8, "target_modules": ATTENTION},
    "mamba": {"r": 5, "target_modules": ["in_proj", "out_proj"], "rank_pattern": {"out_proj": 2}},
    "in": {"r": 3, "target_modules": ["in_proj"], "use_rslora": True},
    "mlp": {"r": 6, "target_modules": ["up_proj", "down_proj"]},
    "router": {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["mixer.gate.weight"]},
    "experts": {"r": 4, "target_modules": ["q_proj"], "target_parameters": EXPERTS},
    "up of experts": {
        "r": 3,
        "target_modules": ["in_proj", "up_proj"],
        "target_parameters": EXPERTS[:1],
    },
    "one layer": {"r": 4, "target_modules": ["in_proj", "q_proj"], "layers_to_transform": [4]},
    "head": {"r": 4, "target_modules": ["out_proj", "lm_head", "embeddings"]},
}
BASES = {
    "nemotron_h": ADAPTERS,
    "granitemoehybrid": {
        "all": ADAPTERS["all"],
        "default": ADAPTERS["default"],
        "mamba": ADAPTERS["mamba"],
        "mlp": {"r": 6, "target_modules": ["input_linear", "shared_mlp.output_linear"]},
        "router": {
            "r": 2,
            "target_modules": ["q_proj"],
            "target_parameters": ["block_sparse_moe.router.weight"],
        },
        "experts": {
            "r": 4,
            "target_modules": ["in_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
        "head": {"r": 4, "target_modules": ["out_proj", "lm_head", "embed_tokens"]},
    },
    "granite_rope": {
        "all": ADAPTERS["all"],
        "mlp": {"r": 6, "target_modules": ["input_linear", "output_linear"]},
        "mamba": ADAPTERS["mamba"],
    },
    "nemotron_h_latent": {
        "all": ADAPTERS["all"],
        "latent": {"r": 3, "target_modules": [*LATENT, "shared_experts.up_proj"]},
        "experts": ADAPTERS["experts"],
        "narrow": {"r": 4, "target_modules": [LATENT[1], "v_proj"]},
        "mamba": ADAPTERS["mamba"],
    },
}


@pytest.fixture(scope="module")
def every_linear():
    """Let PEFT adapt out_proj, too, which trainers other than PEFT adapt.

    PEFT refuses this, because the kernels of mamba_ssm read its weight around LoRA; these tests
    run without these kernels.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.tuners.tuners_utils, "_check_lora_target_modules_mamba", lambda *_: None)
        yield


@pytest.fixture(scope="module", params=BASES)
def world(request, tiny_checkpoints, tmp_path_factory, every_linear):
    folder = tmp_path_factory.mktemp("mamba")
    checkpoint = tiny_checkpoints[request.param]
    return PeftWorld(checkpoint, folder, BASES[request.param], tokens=12, longer=29)


@pytest.mark.parametrize(
    ("world", "settings"),
    in_worlds(BASES, modes(30, 400, overlap=False), on_ranks="nemotron_h"),
    indirect=["world"],
    scope="module",
)
@pytest.mark.usefixtures("forked_followers")
def test_adapters_equal_peft_in_one_batch(world, tmp_path, close_later, settings):
    sizes = {"max_running": 9, "max_batch_adapters": 8, **settings}
    engine = close_later(build(world.checkpoint, world.shelf, tmp_path / "cache", **sizes))
    assert ask(world, Answers(engine)) == world.expected
    assert len({tuple(tokens) for tokens in world.expected.values()}) == len(world.names)


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(name, marks=[] if name == "nemotron_h" else [pytest.mark.soak])
        for name in BASES
    ],
    indirect=True,
    scope="module",
)
def test_requests_of_every_kind_answer_together_as_each_alone(world, tmp_path, close_later):
    """Forced tokens, draws, penalties, stop tokens and several choices, in chunks and preempted."""
    names = (None, "all", "mamba", world.names[2])
    alone = close_later(engine_of_every_kind(world, tmp_path / "alone"))
    want = ask_every_kind(alone, world, together=False, names=names, logprobs=0)
    tight = {"kv_pages": 14, "max_context": 200, "max_batch_tokens": 40}
    engine = close_later(engine_of_every_kind(world, tmp_path / "cache", **tight))
    for _ in ("anew", "with prefix hits"):
        together = ask_every_kind(engine, world, together=True, names=names)
        assert together.tokens == want.tokens
        assert together.finish == want.finish
    assert max(len(output.token_ids) for output in together.outputs["0", 0]) > 1
    assert engine.status().preemptions > 0


@pytest.fixture(scope="module")
def base(tiny_checkpoints):
    return tiny_checkpoints["nemotron_h"]


def spec_of(base, folder, out):
    """Make a folder's blob, and check it against the base model."""
    write_blob(folder, out)
    shape = BaseShape.from_config(read_config(base))
    return read_spec(out, shape, AdapterLimits(max_rank=64, max_bytes=1 << 30))


@pytest.mark.parametrize("tokens", [8, 64, 512])
def test_chunks_change_no_token(base, shelf, tmp_path, close_later, tokens):
    prompts = [prompt(length, length) for length in (200, 1, 63, 64, 65)]
    answers = []
    for name, limit in (("cut", tokens), ("whole", 2048)):
        engine = close_later(
            build(base, shelf, tmp_path / name, max_batch_tokens=limit, max_running=5)
        )
        got = Answers(engine)
        for i, ids in enumerate(prompts):
            got.submit(greedy(f"{i}", ids))
        got.all()
        answers.append(got.tokens)
    assert answers[0] == answers[1]


def test_a_prompt_begins_behind_the_last_state_of_its_prefix(base, shelf, tmp_path, close_later):
    engine = close_later(build(base, shelf, tmp_path / "cache"))
    witness, ids, tokens = RecordingRunner(engine), prompt(200), []
    for name in ("first", "second"):
        before = witness.tokens
        answers = Answers(engine)
        answers.submit(greedy(name, ids, n=3, max_tokens=5))
        answers.all()
        tokens.append([answers.of(name, choice) for choice in range(3)])
        # each choice begins behind the last state, after 192 tokens
        assert witness.tokens - before == (200 if name == "first" else 8) + 2 * 8 + 3 * 4
    assert tokens[0] == tokens[1]


def renamed(folder, target, rename):
    """Save a copy of an adapter's folder with other names of its tensors."""
    shutil.copytree(folder, target)
    path = target / "adapter_model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path)
    return target


@pytest.mark.parametrize("name", ["all", "head", "one layer"])
def test_names_of_the_code_on_the_hub_are_those_of_transformers(world, tmp_path, name):
    """That code calls the decoder `backbone`, in adapters too."""
    if name not in BASES[world.checkpoint.name]:
        pytest.skip("the base model has no such adapter")
    folder = world.folder / name
    theirs = renamed(
        folder,
        tmp_path / "theirs",
        lambda tensor: tensor.replace("base_model.model.model.", "base_model.model.backbone."),
    )
    config = theirs / "adapter_config.json"
    config.write_text(config.read_text().replace('"model.layers.', '"backbone.layers.'))
    ours, other = tmp_path / "ours", tmp_path / "other"
    linears = spec_of(world.checkpoint, folder, ours).linears
    assert spec_of(world.checkpoint, theirs, other).linears == linears
    assert ours.read_bytes() == other.read_bytes()


def test_adapters_of_numbered_experts_are_those_of_their_parameters(world, tmp_path):
    """NVIDIA's code has a linear for each expert, transformers a parameter for all of them."""
    if "experts" not in BASES[world.checkpoint.name] or world.checkpoint.name == "granitemoehybrid":
        pytest.skip("the base model has no such adapter")
    folder, rank = world.folder / "experts", 4
    target = renamed(folder, tmp_path / "numbered", lambda tensor: tensor)
    tensors = {}
    for name, values in load_file(folder / "adapter_model.safetensors").items():
        before, found, after = name.partition(".experts.")
        if not found:
            tensors[name] = values
            continue
        linear = "up_proj" if after.startswith("base_layer.") else "down_proj"
        count = values.shape["lora_B" in after] // rank
        for expert in range(count):
            part = values.view(count, rank, -1)[expert] if "lora_A" in after else None
            if part is None:
                part = values.view(-1, rank, count)[:, :, expert]
            side = after.removeprefix("base_layer.")
            tensors[f"{before}.experts.{expert}.{linear}.{side}"] = part.contiguous()
    save_file(tensors, target / "adapter_model.safetensors")
    config = json.loads((target / "adapter_config.json").read_text())
    config |= {"target_modules": ["q_proj", r"up_proj", "down_proj"], "target_parameters": None}
    config["exclude_modules"] = r".*\.(mixer|shared_experts)\.(up|down)_proj"
    (target / "adapter_config.json").write_text(json.dumps(config))
    one, other = (
        spec_of(world.checkpoint, each, tmp_path / f"{number}")
        for number, each in enumerate((folder, target))
    )
    assert [vars_of(part) for part in one.linears] == [vars_of(part) for part in other.linears]
    blobs = [(tmp_path / str(number)) for number in range(2)]
    written = [load_file(blob) for blob in blobs]
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(written[0][name], written[1][name]) for name in written[0])


def vars_of(part):
    return part.layer, part.linear, part.rank, part.scaling, part.experts


@pytest.mark.parametrize(
    ("part", "shape"), [("conv1d", (8, 64)), ("A_log", (8,)), ("D", (8,)), ("dt_bias", (8,))]
)
@pytest.mark.parametrize("place", ["model", "backbone"])
def test_what_is_no_linear_of_mamba_is_refused_by_name(world, tmp_path, part, shape, place):
    folder = renamed(world.folder / "mamba", tmp_path / "folder", lambda tensor: tensor)
    path = folder / "adapter_model.safetensors"
    tail = "lora_A.weight" if part == "conv1d" else part
    name = f"base_model.model.{place}.layers.0.mixer.{part}.{tail}"
    save_file(load_file(path) | {name: torch.zeros(shape)}, path)
    with pytest.raises(AdapterRejected, match=f"{part}.*train its linears alone") as refused:
        write_blob(folder, tmp_path / "blob")
    assert refused.value.fields["field"] == name


@pytest.mark.parametrize("name", ["all", "mamba"])
def test_no_folder_that_lacks_a_pair_is_taken(world, tmp_path, name):
    folder = world.folder / name
    whole = load_file(folder / "adapter_model.safetensors")
    for number, tensor in enumerate(name for name in whole if "lora_A" in name):
        pair = tensor, tensor.replace("lora_A", "lora_B")
        part = renamed(folder, tmp_path / f"{number}", lambda tensor: tensor)
        kept = {name: values for name, values in whole.items() if name not in pair}
        save_file(kept, part / "adapter_model.safetensors")
        with pytest.raises(AdapterRejected):
            spec_of(world.checkpoint, part, tmp_path / f"blob {number}")


def test_an_adapter_of_another_kind_of_layer_is_refused(world, tmp_path):
    folder = renamed(
        world.folder / "mamba",
        tmp_path / "folder",
        lambda tensor: tensor.replace("layers.0.", "layers.2."),
    )
    # where layer 2 is a Mamba 2 mixer too, layer 0 lacks its linears
    said = r"layer (2 of the base model is .* and has no in_proj|0, a Mamba 2 mixer in the base)"
    with pytest.raises(AdapterRejected, match=said):
        spec_of(world.checkpoint, folder, tmp_path / "blob")
