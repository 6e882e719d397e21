"""A saved copy of a base model's matrix is its own in whatever dtype, or it is told apart."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file

from lorikeet_engine.adapter_format import BaseCopy
from lorikeet_engine.models.base_copies import changed_copies
from lorikeet_engine.models.checkpoint import DTYPES


def copy_of(matrix, dtype, module="lm_head"):
    cast = matrix.to(DTYPES[dtype]).contiguous()
    hashed = hashlib.sha256(cast.view(torch.uint8).numpy().tobytes()).hexdigest()
    return BaseCopy(module, dtype, tuple(matrix.shape), hashed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_in_any_dtype_is_the_base_models(dtype, tiny_checkpoints):
    folder = tiny_checkpoints["llama"]
    tensors = load_file(folder / "model.safetensors")
    head, embeddings = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    same = [copy_of(head, dtype), copy_of(embeddings, dtype, "embed_tokens")]
    assert changed_copies(folder, same) == []
    assert changed_copies(folder, [copy_of(embeddings, dtype), same[1]]) == ["lm_head"]
    trained = embeddings.clone()
    trained[3, 5] += 0.5
    assert changed_copies(folder, [copy_of(trained, dtype, "embed_tokens")]) == ["embed_tokens"]


def test_where_embeddings_are_tied_the_head_is_their_matrix(tied_checkpoints):
    folder = tied_checkpoints["qwen2"]
    embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert changed_copies(folder, [copy_of(embeddings, "BF16")]) == []
    assert changed_copies(folder, [copy_of(embeddings * 2, "BF16")]) == ["lm_head"]
