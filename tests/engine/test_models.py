"""Every family computes what transformers computes, however its tokens are cut into batches."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import LINEARS, BaseShape
from lorikeet_engine.errors import ModelError
from lorikeet_engine.kernels.attention import SdpaAttention
from lorikeet_engine.kernels.lora.types import LoraWeights, Segments
from lorikeet_engine.models import ModelConfig, load_model
from lorikeet_engine.runner import Runner

NAMES = ["llama", "mistral", "qwen2", "qwen3", "llama3_rope", "biased", "tied", "sharded"]
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def folder_of(tiny_checkpoints, variant_checkpoints):
    return {**tiny_checkpoints, **variant_checkpoints}


@pytest.fixture
def edited(tiny_checkpoints, tmp_path):
    """A copy of a checkpoint whose config.json has other values; None removes a key."""

    def edit(name, **changes):
        folder = tmp_path / name
        shutil.copytree(tiny_checkpoints[name], folder)
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return folder

    return edit


def load(folder, device="cpu", dtype=torch.float32):
    return load_model(folder, torch.device(device), dtype)


def reference(folder, prompt, changes=()):
    """Logits [tokens, vocab] of transformers; changes: what to add to which weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        for name, change in changes:
            model.get_parameter(name).add_(change)
        return model(torch.tensor([prompt])).logits[0]


def prompt_of(length, seed=0):
    generator = torch.Generator().manual_seed(length + 1000 * seed)
    return torch.randint(256, (length,), generator=generator).tolist()


def random_adapter(shape, rank):
    """An adapter of every linear, in slot 0 and as changes to the base model's weights."""
    parts, changes, end = [], [], 0
    generator = torch.Generator().manual_seed(5)
    table = torch.zeros(1, shape.layers, len(LINEARS), 3, dtype=torch.int64)
    for layer in range(shape.layers):
        for i, linear in enumerate(LINEARS):
            d_in, d_out = shape.dims(i)
            a = torch.randn(rank, d_in, generator=generator) / 10
            b = torch.randn(d_out, rank, generator=generator) / 10
            block = "self_attn" if i < 4 else "mlp"
            changes.append((f"model.layers.{layer}.{block}.{linear}.weight", b @ a))
            table[0, layer, i] = torch.tensor([end, end + a.numel(), rank])
            parts += [a.flatten(), b.flatten()]
            end += a.numel() + b.numel()
    return LoraWeights(torch.cat(parts), table), changes


class Run:
    """A model over a KV cache full of NaN; collects each sequence's logits."""

    def __init__(self, folder, tokens, dtype=torch.float32, lora=None):
        model = load(folder, tokens.device, dtype)
        c = model.config
        shape = (c.layers, 2, tokens.pages, tokens.page_size, c.kv_heads, c.head_dim)
        kv = torch.full(shape, torch.nan, dtype=dtype, device=tokens.device)
        self.runner = Runner(model, SdpaAttention(), lora, kv)
        self.tokens = tokens
        self.logits = {}

    def step(self, chunks):
        batch = self.tokens.batch(chunks)
        parts = self.runner.forward(batch).split([len(chunk) for chunk in chunks.values()])
        for name, part in zip(chunks, parts, strict=True):
            assert part.dtype == torch.float32
            self.logits[name] = torch.cat([*self.logits.get(name, ()), *part.split(1)]).split(1)

    def of(self, name):
        return torch.cat(self.logits[name])


def assert_equal(got, want, eps=EPS):
    # two runs of 40 sums over 64 and more terms, each off by some roundings of its own
    torch.testing.assert_close(got, want, rtol=0, atol=100 * eps * want.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers_however_the_prompts_are_cut(name, folder_of, paged_tokens):
    prompts = {"one": prompt_of(1), "odd": prompt_of(63), "long": prompt_of(133)}
    want = {key: reference(folder_of[name], prompt) for key, prompt in prompts.items()}

    whole = Run(folder_of[name], paged_tokens())
    whole.step(prompts)

    chunked = Run(folder_of[name], paged_tokens())
    chunked.step({"odd": prompts["odd"][:40], "long": prompts["long"][:17]})
    chunked.step(
        {"long": prompts["long"][17:80], "one": prompts["one"], "odd": prompts["odd"][40:]}
    )
    chunked.step({"long": prompts["long"][80:]})

    single = Run(folder_of[name], paged_tokens())
    single.step({"long": prompts["long"][:100]})
    for i in range(33):
        single.step({"odd": prompts["odd"][i : i + 1], "long": prompts["long"][100 + i : 101 + i]})

    for key in prompts:
        assert_equal(whole.of(key), want[key])
        assert_equal(chunked.of(key), want[key])
    assert_equal(single.of("long"), want["long"])
    assert_equal(single.of("odd"), want["odd"][:33])


def test_long_positions_turn_as_transformers_turns_them(folder_of, paged_tokens):
    prompt = prompt_of(512)
    run = Run(folder_of["llama3_rope"], paged_tokens())
    run.step({"a": prompt})
    assert_equal(run.of("a"), reference(folder_of["llama3_rope"], prompt))


def test_only_the_wanted_rows_get_logits(tiny_checkpoints, paged_tokens):
    run = Run(tiny_checkpoints["llama"], paged_tokens())
    batch = run.tokens.batch({"a": prompt_of(5), "b": prompt_of(3)})
    logits = run.runner.forward(replace(batch, logit_rows=torch.tensor([7, 4])))
    assert_equal(logits[1:], reference(tiny_checkpoints["llama"], prompt_of(5))[-1:])
    assert_equal(logits[:1], reference(tiny_checkpoints["llama"], prompt_of(3))[-1:])


def test_adapters_change_the_logits_of_their_own_sequences(tiny_checkpoints, paged_tokens):
    base, prompts = tiny_checkpoints["llama"], {"plain": prompt_of(5), "tuned": prompt_of(7)}
    shape = BaseShape.from_config(json.loads((base / "config.json").read_text()))
    lora, merged = random_adapter(shape, rank=3)
    run = Run(base, paged_tokens(), lora=lora)
    segments = Segments(*(torch.tensor([n], dtype=torch.int32) for n in (0, 5, 7)), max_rank=3)
    batch = replace(run.tokens.batch(prompts), segments=segments)
    logits = run.runner.forward(batch)
    assert_equal(logits[:5], reference(base, prompts["plain"]))
    assert_equal(logits[5:], reference(base, prompts["tuned"], merged))


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_stays_within_its_precision(name, device, folder_of, paged_tokens):
    prompt = prompt_of(63)
    run = Run(folder_of[name], paged_tokens(device), torch.bfloat16)
    run.step({"a": prompt[:40], "b": prompt_of(5)})
    for token in prompt[40:]:
        run.step({"a": [token]})
    got, want = run.of("a").cpu(), reference(folder_of[name], prompt)
    error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert error < 8 * torch.finfo(torch.bfloat16).eps


def test_a_config_tells_the_engine_its_sizes(folder_of):
    config = ModelConfig.from_folder(folder_of["qwen3"])
    assert (config.vocab_size, config.max_context, config.hidden) == (256, 512, 64)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (2, 4, 2, 32)


def test_end_of_sequence_ids_come_from_both_files(edited):
    folder = edited("llama", eos_token_id=[9, 3])
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert ModelConfig.from_folder(folder).eos_token_ids == (3, 5, 9)


def test_the_older_way_to_write_rope_means_the_same(folder_of, edited, tiny_checkpoints):
    new = json.loads((folder_of["llama3_rope"] / "config.json").read_text())["rope_parameters"]
    theta = new.pop("rope_theta")
    old = edited("llama", rope_parameters=None, rope_theta=theta, rope_scaling=new)
    want = ModelConfig.from_folder(folder_of["llama3_rope"])
    assert ModelConfig.from_folder(old).rope == want.rope


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("llama", {"model_type": "gpt2"}, "model_type"),
        ("llama", {"hidden_size": None}, "hidden_size"),
        ("llama", {"vocab_size": "many"}, "vocab_size"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_parameters.rope_type",
        ),
        (
            "llama",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling.rope_type",
        ),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "factor"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("mistral", {"sliding_window": 511}, "sliding_window"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "layer_types": None,
             "max_window_layers": 1},
            "sliding_window",
        ),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(edited, family, changes, field):
    with pytest.raises(ModelError) as refused:
        load(edited(family, **changes))
    assert refused.value.field == field
    assert field.split(".")[-1] in str(refused.value)


def test_a_window_that_hides_nothing_is_no_obstacle(edited):
    folder = edited("mistral", sliding_window=64)
    assert ModelConfig.from_folder(folder, max_context=64).max_context == 64
    unused = {"use_sliding_window": False, "sliding_window": 64}
    assert ModelConfig.from_folder(edited("qwen2", **unused)).max_context == 512
    above = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    folder = edited("qwen3", **above, layer_types=None)
    assert ModelConfig.from_folder(folder).max_context == 512


def test_a_context_beyond_the_position_embeddings_is_refused(tiny_checkpoints):
    with pytest.raises(ModelError, match="max_position_embeddings"):
        ModelConfig.from_folder(tiny_checkpoints["llama"], max_context=513)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t, name: t.pop(name), "is missing"),
        (lambda t, name: t.update({name: t[name][:-1].clone()}), "want"),
        (lambda t, name: t.update({name: t[name].to(torch.int8)}), "I8"),
    ],
    ids=["missing", "misshapen", "quantised"],
)
def test_a_tensor_that_does_not_fit_is_named(edited, spoil, message):
    folder, name = edited("qwen2"), "model.layers.1.self_attn.k_proj.bias"
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors, name)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message) as refused:
        load(folder)
    assert refused.value.field == name
    assert name in str(refused.value)


def test_tensors_that_the_config_does_not_know_are_refused(edited):
    with pytest.raises(ModelError, match=r"k_norm\.weight .* do not belong together"):
        load(edited("qwen3", model_type="llama"))


def test_a_missing_shard_is_named(variant_checkpoints, tmp_path):
    folder = shutil.copytree(variant_checkpoints["sharded"], tmp_path / "copy")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[-1].unlink()
    with pytest.raises(ModelError) as refused:
        load(folder)
    assert refused.value.field == shards[-1].name


def test_a_truncated_file_is_named(edited):
    folder = edited("llama")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="no whole safetensors file"):
        load(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_folder_without_a_file_says_which(edited, file):
    folder = edited("llama")
    (folder / file).unlink()
    with pytest.raises(ModelError, match="does not exist") as refused:
        load(folder)
    assert refused.value.field == file
