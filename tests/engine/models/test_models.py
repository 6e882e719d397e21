"""Every family computes what transformers computes, however its tokens are cut into batches."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import FAMILIES as FAMILY_TABLE
from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.execution.kv_tensors import allocate_states, kv_shape
from lorikeet_engine.execution.steps import ModelRunner
from lorikeet_engine.kernels.attention.sdpa import SdpaAttention
from lorikeet_engine.kernels.lora.types import LoraWeights, Segments
from lorikeet_engine.models.llama import load_model
from lorikeet_engine.parallel.shard import WHOLE
from tests.engine.conftest import (
    FAMILIES,
    GEMMA4_E,
    GEMMA4_MOE,
    GPT_OSS,
    HYBRID,
    LATENT,
    MAMBA,
    MOE,
    VARIANTS,
)

NAMES = [
    *(*FAMILIES, *MOE, *GEMMA4_MOE, *GEMMA4_E, *HYBRID, *MAMBA, *LATENT, *GPT_OSS),
    *(name for name in VARIANTS if name != "longrope"),
]
MIXTURES = (*MOE, "qwen3_5_moe_text", "qwen3_next", "deepseek_v3", "deepseek_v3_whole_queries")
EPS = torch.finfo(torch.float32).eps


def load(folder, device="cpu", dtype=torch.float32, max_context=None):
    return load_model(folder, torch.device(device), dtype, max_context)


def reference(folder, prompt, changes=()):
    """Logits [tokens, vocab] of transformers; changes: what to add to which weights."""
    return references(folder, [prompt], changes)[0]


def references(folder, prompts, changes=()):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        for name, change in changes:
            model.get_parameter(name).add_(change)
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


def prompt_of(length, seed=0):
    generator = torch.Generator().manual_seed(length + 1000 * seed)
    return torch.randint(256, (length,), generator=generator).tolist()


def random_adapter(shape, rank):
    """An adapter of every linear, in slot 0 and as changes to the base model's weights."""
    parts, changes, end = [], [], 0
    generator = torch.Generator().manual_seed(5)
    table = torch.zeros(1, shape.layers + 1, len(shape.modules), 3, dtype=torch.int64)
    kept = WHOLE.ranges(shape)
    places = [(n, i) for n in range(shape.layers) for i in range(len(shape.linears))]
    places = [place for place in places if shape.has(*place)]
    outer = len(FAMILY_TABLE[shape.family].outer)
    places += [(shape.outer_layer, len(shape.linears) + at) for at in range(outer)]
    for layer, i in places:
        linear = shape.modules[i]
        d_in, d_out = shape.dims(i)
        a = torch.randn(rank, d_in, generator=generator) / 10
        b = torch.randn(d_out, rank, generator=generator) / 10
        path = linear.module if layer == shape.outer_layer else linear.path(layer)
        changes.append((f"{path}.weight", b @ a))
        table[0, layer, i] = torch.tensor([end, end + a.numel(), rank])
        rows = [row for part in kept[i].outputs for row in part]
        parts += [a.flatten(), b[rows].T.flatten()]
        end += a.numel() + b.numel()
    return LoraWeights(torch.cat(parts), table), changes


class Run:
    """A model over a KV cache full of NaN; collects each sequence's logits."""

    def __init__(self, folder, tokens, dtype=torch.float32, lora=None, model=None):
        model = model or load(folder, tokens.device, dtype)
        config, tokens.windows = model.config, model.config.kv_groups.windows
        pages, page_size = tokens.all_pages, tokens.page_size
        shape = kv_shape(config, model.shape, pages, page_size, tokens.device)
        kv = torch.full(shape, torch.nan, dtype=dtype, device=tokens.device)
        latents = config.shape.latents
        attention = SdpaAttention(
            config.attention_soft_cap,
            config.attention_scale,
            0 if latents is None else latents.kv_rank,
        )
        states = allocate_states(model.shape, tokens.all_pages, dtype, kv.device)
        for each in states.tensors if states is not None else ():
            each.fill_(torch.nan if each.is_floating_point() else 5)
        self.runner = ModelRunner(model, attention, lora, kv, states=states)
        self.tokens = tokens
        self.logits = {}

    def step(self, chunks):
        batch = self.tokens.batch(chunks)
        parts = self.runner.forward(batch).split([len(chunk) for chunk in chunks.values()])
        for name, part in zip(chunks, parts, strict=True):
            rows = [*self.logits.get(name, ()), *part.float().split(1)]
            self.logits[name] = torch.cat(rows).split(1)

    def of(self, name):
        return torch.cat(self.logits[name])


def assert_equal(got, want, eps=EPS):
    # Two runs of 40 sums over 64 and more terms, each off by some roundings of its own, which
    # random weights amplify: transformers' own float32 is up to 95 eps off its float64 in a
    # mixture, and processors sum in different orders.
    torch.testing.assert_close(got, want, rtol=0, atol=400 * eps * want.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers_however_the_prompts_are_cut(
    name, tiny_checkpoints, paged_tokens
):
    prompts = {"one": prompt_of(1), "odd": prompt_of(63), "long": prompt_of(133)}
    logits = references(tiny_checkpoints[name], prompts.values())
    want = dict(zip(prompts, logits, strict=True))

    whole = Run(tiny_checkpoints[name], paged_tokens())
    whole.step(prompts)

    chunked = Run(tiny_checkpoints[name], paged_tokens())
    chunked.step({"odd": prompts["odd"][:40], "long": prompts["long"][:17]})
    chunked.step(
        {"long": prompts["long"][17:80], "one": prompts["one"], "odd": prompts["odd"][40:]}
    )
    chunked.step({"long": prompts["long"][80:]})

    single = Run(tiny_checkpoints[name], paged_tokens())
    single.step({"long": prompts["long"][:108]})
    for i in range(8):  # into another page
        single.step({"odd": prompts["odd"][i : i + 1], "long": prompts["long"][108 + i : 109 + i]})

    for key in prompts:
        assert_equal(whole.of(key), want[key])
        assert_equal(chunked.of(key), want[key])
    assert_equal(single.of("long"), want["long"][:116])
    assert_equal(single.of("odd"), want["odd"][:8])


@pytest.mark.parametrize(
    "name", ["llama3_rope", "linear_rope", "dynamic_rope", "yarn", "yarn_mscale"]
)
def test_long_positions_turn_as_transformers_turns_them(name, tiny_checkpoints, paged_tokens):
    prompt = prompt_of(512)
    run = Run(tiny_checkpoints[name], paged_tokens())
    run.step({"a": prompt})
    assert_equal(run.of("a"), reference(tiny_checkpoints[name], prompt))


@pytest.mark.parametrize(
    ("length", "max_context"), [(133, 512), (9, 9), (8, 8), (1, 8)]
)  # the original context is 8
def test_longrope_uses_the_factors_of_the_longest_context(
    length, max_context, tiny_checkpoints, paged_tokens
):
    folder, prompt = tiny_checkpoints["longrope"], prompt_of(length)
    run = Run(folder, paged_tokens(), model=load(folder, max_context=max_context))
    run.step({"a": prompt[: length // 2 + 1]})
    if rest := prompt[length // 2 + 1 :]:
        run.step({"a": rest})
    assert_equal(run.of("a"), reference(folder, prompt))


def test_only_the_wanted_rows_get_logits(tiny_checkpoints, paged_tokens):
    run = Run(tiny_checkpoints["llama"], paged_tokens())
    batch = run.tokens.batch({"a": prompt_of(5), "b": prompt_of(3)})
    logits = run.runner.forward(replace(batch, logit_rows=torch.tensor([7, 4])))
    assert_equal(logits[1:], reference(tiny_checkpoints["llama"], prompt_of(5))[-1:])
    assert_equal(logits[:1], reference(tiny_checkpoints["llama"], prompt_of(3))[-1:])


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
def test_adapters_change_the_logits_of_their_own_sequences(name, tiny_checkpoints, paged_tokens):
    base, prompts = tiny_checkpoints[name], {"plain": prompt_of(5), "tuned": prompt_of(7)}
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
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in MIXTURES])
def test_bfloat16_stays_within_its_precision(name, device, tiny_checkpoints, paged_tokens):
    prompt = prompt_of(63)
    run = Run(tiny_checkpoints[name], paged_tokens(device), torch.bfloat16)
    run.step({"a": prompt[:58], "b": prompt_of(5)})
    for token in prompt[58:]:
        run.step({"a": [token]})
    got, want = run.of("a").cpu(), reference(tiny_checkpoints[name], prompt)
    error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
    pairs_of_layers = run.runner.model.shape.layers / 2  # roundings of each are on top of the rest
    assert error < 8 * pairs_of_layers**0.5 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_are_cast_exactly(stored, edited, paged_tokens):
    folder = edited("mistral")
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v.to(stored) for k, v in tensors.items()}, folder / "model.safetensors")
    run = Run(folder, paged_tokens())
    run.step({"a": prompt_of(5)})
    assert_equal(run.of("a"), reference(folder, prompt_of(5)))
