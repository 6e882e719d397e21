"""An engine with an FP8 KV cache equals transformers and PEFT with rounded keys and values.

A number between two of E4M3's may be rounded to either, depending on the last digit of earlier
results. So a token is compared by the reference's logits for it, not with another token.
Every family is in the matrix; here are scores of prompts, and checkpoints with scales.
"""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lorikeet_engine.errors import ModelError
from lorikeet_engine.models.llama import load_model, rehearse_load
from tests.engine.engine_driver import Answers, build, greedy
from tests.engine.peft_world import PeftWorld, ask

pytestmark = pytest.mark.usefixtures("one_thread")
# The first family has biased keys, the second normed keys, the third windows.
FAMILIES = ("qwen2", "qwen3", "olmo3")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "rank8_all": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "rank16_kv": {"r": 16, "lora_alpha": 32, "target_modules": ["k_proj", "v_proj"]},
}
TOKENS = 40
SHORTFALL = 0.01  # as a share of the largest logit
LAYER_SCALES = ((0.02, 0.5), (1.7, 0.03))  # of each layer: (keys, values)
NAMES = (
    *("self_attn.{}_scale", "self_attn.attn.{}_scale", "self_attn.{}_proj.{}_scale"),
    "self_attn.{}_proj.output_scale",
)
# compressed-tensors' quantization_config for keys and values only.
KV_ALONE = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "format": "dense",
    "ignore": [],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
}


class RoundedCache(transformers.DynamicCache):
    """KV cache of transformers that rounds keys and values to E4M3.

    scales: of each layer, (keys', values').
    """

    def __init__(self, scales):
        super().__init__()
        self._scales = scales

    def update(self, keys, values, layer, *args, **kwargs):
        of_keys, of_values = self._scales[layer]
        keys, values = rounded(keys, of_keys), rounded(values, of_values)
        return super().update(keys, values, layer, *args, **kwargs)


def rounded(x, scale):
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@torch.inference_mode()
def reference_logits(world, name, ids, scales):
    """Return the logits after each token of a prompt with its answer."""
    cache = RoundedCache(scales)
    return world.model(name)(torch.tensor([ids]), past_key_values=cache).logits[0]


def assert_most_likely(world, answers, scales=((1.0, 1.0),) * 2):
    """Check that every token's logit reaches the reference's largest one, up to SHORTFALL."""
    for name, tokens in answers.items():
        assert len(tokens) == TOKENS
        ids = world.prompts[name] + tokens
        logits = reference_logits(world, name, ids, scales)[-TOKENS - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert ((logits.amax(1) - chosen) / logits.abs().amax(1)).max() < SHORTFALL, name


@pytest.fixture(scope="module", params=FAMILIES)
def world(request, tiny_checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return PeftWorld(tiny_checkpoints[request.param], folder, ADAPTERS, TOKENS)


@pytest.fixture
def start(world, tmp_path):
    """Return a function that starts the engine of a checkpoint, by default the world's."""
    started = []

    def start(checkpoint=world.checkpoint, **settings):
        engine = build(checkpoint, world.shelf, tmp_path / "cache", **settings)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()


def test_prompts_are_scored_with_the_rounded_keys_and_values(start, world):
    answers = Answers(start(kv_dtype="fp8", max_batch_tokens=13, max_running=13))
    name, ids = "rank8_all", world.prompts["rank16_kv"]
    answers.submit(greedy("r", ids, adapter=world.refs[name], prompt_logprobs=1, max_tokens=1))
    answers.all()
    logits = reference_logits(world, name, ids, ((1.0, 1.0),) * 2)
    want = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    told = [score.logprob for score in answers.scores["r", 0]]
    assert told == pytest.approx(want.tolist(), abs=SHORTFALL * logits.abs().max().item())


def with_scales(checkpoint, folder, pattern, scales=LAYER_SCALES):
    """Copy a checkpoint, with scales under names of this pattern and declared in its config."""
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer, of_layer in enumerate(scales):
        for part, scale in zip("kv", of_layer, strict=True):
            name = f"model.layers.{layer}.{pattern.format(part, part)}"
            tensors[name] = torch.tensor([scale])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": KV_ALONE}))
    return folder


def test_scales_of_the_checkpoint_are_used(start, world, tmp_path):
    checkpoint = with_scales(world.checkpoint, tmp_path / "scaled", NAMES[0])
    answered = ask(world, Answers(start(checkpoint, kv_dtype="fp8")))
    assert_most_likely(world, answered, LAYER_SCALES)
    with pytest.raises(AssertionError):
        assert_most_likely(world, answered)


def test_scales_of_the_checkpoint_are_ignored_if_the_cache_is_not_fp8(start, world, tmp_path):
    checkpoint = with_scales(world.checkpoint, tmp_path / "scaled", NAMES[0])
    assert ask(world, Answers(start(checkpoint))) == world.expected


@pytest.mark.parametrize("pattern", NAMES)
def test_scales_are_found_under_each_known_name(tiny_checkpoints, tmp_path, pattern):
    folder = with_scales(tiny_checkpoints["llama"], tmp_path / "scaled", pattern)
    rehearse_load(folder, torch.float32)
    model = load_model(folder, torch.device("cpu"), torch.float32)
    found = [layer.mixer.kv_scales for layer in model._layers]
    assert [(scales.key, scales.value) for scales in found] == [
        pytest.approx(of_layer) for of_layer in LAYER_SCALES
    ]


def test_a_modelopt_checkpoint_may_scale_only_keys_and_values(tiny_checkpoints, tmp_path):
    folder = with_scales(tiny_checkpoints["llama"], tmp_path / "scaled", NAMES[2])
    path = folder / "config.json"
    said = {
        "quant_method": "modelopt",
        "ignore": [],
        "kv_cache_scheme": KV_ALONE["kv_cache_scheme"],
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    assert rehearse_load(folder, torch.float32)[0].quantized_linears is None


def test_one_scale_can_serve_keys_and_values(tiny_checkpoints, tmp_path):
    folder = with_scales(tiny_checkpoints["llama"], tmp_path / "one", "self_attn.kv_scale")
    model = load_model(folder, torch.device("cpu"), torch.float32)
    scales = model._layers[1].mixer.kv_scales
    assert scales.key == scales.value == pytest.approx(LAYER_SCALES[1][1])


def test_the_largest_scale_of_all_heads_is_used(tiny_checkpoints, tmp_path):
    scales = (((0.02, 0.3), (0.5, 0.4)),) * 2
    folder = with_scales(tiny_checkpoints["llama"], tmp_path / "heads", NAMES[0], scales)
    model = load_model(folder, torch.device("cpu"), torch.float32)
    found = model._layers[0].mixer.kv_scales
    assert (found.key, found.value) == (pytest.approx(0.3), pytest.approx(0.5))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_not_above_0_is_refused(tiny_checkpoints, tmp_path, scale):
    scales = ((1.0, 1.0), (1.0, scale))
    folder = with_scales(tiny_checkpoints["llama"], tmp_path / "scaled", NAMES[0], scales)
    with pytest.raises(ModelError, match="want numbers above 0") as refused:
        rehearse_load(folder, torch.float32)
    assert refused.value.field == "model.layers.1.self_attn.v_scale"
