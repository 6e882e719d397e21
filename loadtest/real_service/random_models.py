"""Model folders of given shapes with random weights, complete enough to be served."""

import argparse
import itertools
import json
import shutil
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from loadtest.engine.random_checkpoint import write_checkpoint
from loadtest.engine.random_model import LLAMA_3_1_8B
from lorikeet_engine.adapter_format import FAMILIES

QWEN3_0_6B: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
TINY: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": LLAMA_3_1_8B,
    "qwen3-0.6b": QWEN3_0_6B,
    "tiny": TINY,
}
"""Configs, by the name under which the model is served."""
LINEARS = tuple(linear.name for linear in FAMILIES["llama"].linears)
"""Names of the linears of each layer, the same for every shape."""

END = "<|end|>"
_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def write_model(folder: Path, shape: str, device: str) -> Path:
    """Write a bfloat16 checkpoint, its tokenizer and a chat template to folder / shape.

    shape: a name in SHAPES.
    device: device on which the numbers are drawn.
    Existing files are kept.
    """
    config = SHAPES[shape]
    model = write_checkpoint(folder / shape, config, torch.device(device))
    tokenizer = model / "tokenizer.json"
    if not tokenizer.exists():
        vocabulary = random_vocabulary(config["vocab_size"])
        vocabulary.save(str(tokenizer))
        config_json = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        (model / "tokenizer_config.json").write_text(json.dumps(config_json))
        (model / "chat_template.jinja").write_text(_TEMPLATE)
    return model


def add_model_arguments(parser: argparse.ArgumentParser, kv: str = "20GiB") -> None:
    """Add the arguments that `settings_of_model` reads.

    kv: default of --kv.
    """
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="folder for the model, adapters and caches")
    add("--shape", choices=SHAPES, default="llama-3.1-8b", help="shape of the model")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--kv", default=kv, help=f"KV cache of each replica; default {kv}")


def settings_of_model(given: argparse.Namespace, own: str, **others: object) -> dict[str, str]:
    """Write the checkpoint; return the LORIKEET_ variables of a service of it.

    own: folder in `given.folder` for the catalog and the cache; it is deleted first.
    others: further settings, by their names in lower case.
    """
    shutil.rmtree(given.folder / own, ignore_errors=True)
    settings = {
        "base_models": f"{given.shape}={write_model(given.folder, given.shape, given.device)}",
        "catalog": given.folder / own / "catalog",
        "cache_dir": given.folder / own / "cache",
        "device": given.device,
        "kv_cache_memory": given.kv,
        **others,
    }
    return {f"LORIKEET_{name.upper()}": str(value) for name, value in settings.items()}


def random_vocabulary(size: int) -> Tokenizer:
    """Make a byte-level tokenizer of `size` tokens with distinct texts.

    There are no merges, so a text becomes one token per byte; but every id that a model draws has a
    text: the 256 bytes, words of letters after a space, and END as the last id.
    """
    words = itertools.chain(sorted(pre_tokenizers.ByteLevel.alphabet()), _words())
    named = {word: index for index, word in enumerate(itertools.islice(words, size - 1))}
    tokenizer = Tokenizer(models.BPE(vocab=named, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def _words() -> Iterator[str]:
    """Yield a space, as byte-level tokenizers write it, with letters: Ġa, Ġb, …, Ġaa, …."""
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield "Ġ" + "".join(letters)
