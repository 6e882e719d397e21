"""The hash of a base model's matrix is that of a copy that a trainer saves, in whatever dtype."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file

from lorikeet_engine.adapter_format import row_digests
from lorikeet_engine.models.base_sha256 import base_row_digests, base_sha256
from lorikeet_engine.models.checkpoint import DTYPES


def hash_of(matrix, dtype):
    cast = matrix.to(DTYPES[dtype]).contiguous()
    return hashlib.sha256(cast.view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_matrix_has_the_hash_of_its_copy(dtype, tiny_checkpoints):
    folder = tiny_checkpoints["llama"]
    tensors = load_file(folder / "model.safetensors")
    head, embeddings = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    assert base_sha256(folder, "lm_head", dtype) == hash_of(head, dtype)
    assert base_sha256(folder, "embed_tokens", dtype) == hash_of(embeddings, dtype)


def test_each_row_has_the_digest_of_its_copy(monkeypatch, tiny_checkpoints):
    folder = tiny_checkpoints["llama"]
    head = load_file(folder / "model.safetensors")["lm_head.weight"].to(torch.bfloat16)
    monkeypatch.setattr("lorikeet_engine.models.base_sha256._HASHED_BYTES", 1000)
    want = row_digests(row.view(torch.uint8).numpy().tobytes() for row in head)
    assert base_row_digests(folder, "lm_head", "BF16") == want


def test_where_embeddings_are_tied_the_head_is_their_matrix(tiny_checkpoints):
    folder = tiny_checkpoints["tied qwen2"]
    embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert base_sha256(folder, "lm_head", "BF16") == hash_of(embeddings, "BF16")
