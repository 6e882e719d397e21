"""Copies of the base model's matrices are left out of a blob, which has their hashes."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import (
    AdapterLimits,
    base_copies,
    keep_rows,
    read_spec,
    row_digests,
    whole_modules,
    write_blob,
)
from lorikeet_engine.adapter_format.tensor_names import whole_name
from lorikeet_engine.errors import AdapterRejected
from tests.engine.adapter_format.peft_folder import edit_config, edit_weights
from tests.engine.tiny_llama import SHAPE, trained

LIMITS = AdapterLimits(max_rank=16, max_bytes=1 << 20)
HEAD, EMBEDDINGS = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"
MATRIX = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)


def test_the_head_that_peft_saves_beside_lora_is_left_out(tmp_path):
    model = trained(r=4, target_modules=["q_proj", "lm_head"])
    model.save_pretrained(tmp_path)
    head = model.get_base_model().lm_head.base_layer.weight.detach().numpy()
    write_blob(tmp_path, tmp_path / "blob")
    (copy,) = base_copies(tmp_path / "blob")
    assert (copy.module, copy.dtype, copy.shape) == ("lm_head", "F32", (64, 32))
    assert copy.sha256 == hashlib.sha256(head.tobytes()).hexdigest()
    assert head.tobytes() not in (tmp_path / "blob").read_bytes()
    assert len(read_spec(tmp_path / "blob", SHAPE, LIMITS).linears) == 3


def test_head_and_embeddings_are_left_out_under_any_name(folder):
    alone = write_blob(folder, folder / "alone")
    edit_weights(folder, lambda t: t.update({HEAD: MATRIX, EMBEDDINGS: MATRIX.astype(np.float16)}))
    assert write_blob(folder, folder / "blob") != alone
    copies = base_copies(folder / "blob")
    assert [(copy.module, copy.dtype) for copy in copies] == [
        ("embed_tokens", "F16"),
        ("lm_head", "F32"),
    ]
    assert base_copies(folder / "alone") == ()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_resized_copy_becomes_the_rows_behind_the_vocabulary_with_the_trained_tokens(
    dtype, tmp_path
):
    """The reference casts with torch, as PEFT does when it puts trained rows into the matrix."""
    kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype]
    ids = [65, 3, 66]
    model = trained(r=4, target_modules=["q_proj"])
    model.save_pretrained(tmp_path)
    matrix, delta = torch.randn(67, 32).to(kind), torch.randn(3, 32)
    want = matrix.clone()
    want[ids] = delta.to(kind)
    rows = EMBEDDINGS.replace(".weight", ".token_adapter.base_layer.weight")
    file = tmp_path / "adapter_model.safetensors"
    of_rows = EMBEDDINGS.replace(".weight", ".token_adapter.trainable_tokens_delta")
    save_file(load_file(file) | {rows: matrix, of_rows: delta, HEAD: matrix.clone()}, file)
    edit_config(tmp_path, trainable_token_indices={"embed_tokens": ids})
    write_blob(tmp_path, tmp_path / "blob")
    found = load_file(tmp_path / "blob")
    assert torch.equal(found[whole_name("model.embed_tokens")], want)
    assert torch.equal(found[whole_name("lm_head")], matrix)
    with pytest.raises(AdapterRejected, match=r"token 66 .* set LORIKEET_MAX_ADDED_TOKENS, now 0"):
        read_spec(tmp_path / "blob", SHAPE, LIMITS)
    kept = {"embed_tokens": [3, 64, 65, 66], "lm_head": [64, 65, 66]}
    keep_rows(tmp_path / "blob", tmp_path / "less", kept)
    more = replace(LIMITS, max_added_tokens=3)
    assert read_spec(tmp_path / "less", SHAPE, more).vocabulary == 67
    keep_rows(tmp_path / "blob", tmp_path / "one", kept | {"lm_head": [64, 65]})
    with pytest.raises(AdapterRejected, match="lm_head: the row of token 66, which the base model"):
        read_spec(tmp_path / "one", SHAPE, more)


@pytest.mark.parametrize(
    ("ids", "shape", "says"),
    [
        ([65, 3], (3, 32), r"its rows are \[3, 32\] beside \[67, 32\], not \[2, 32\]"),
        ([65, 3], (2, 48), r"its rows are \[2, 48\] beside \[67, 32\], not \[2, 32\]"),
        ([67, 3], (2, 32), "token 67 has no row in the file's matrix of 67: save the"),
    ],
)
def test_trained_tokens_that_do_not_fit_their_resized_matrix_are_refused(
    ids, shape, says, tmp_path
):
    trained(r=4, target_modules=["q_proj"]).save_pretrained(tmp_path)
    rows = EMBEDDINGS.replace(".weight", ".token_adapter.base_layer.weight")
    of_rows = EMBEDDINGS.replace(".weight", ".token_adapter.trainable_tokens_delta")
    more = {rows: np.zeros((67, 32), np.float32), of_rows: np.ones(shape, np.float32)}
    edit_weights(tmp_path, lambda t: t.update(more))
    edit_config(tmp_path, trainable_token_indices={"embed_tokens": ids})
    with pytest.raises(AdapterRejected, match=says):
        write_blob(tmp_path, tmp_path / "blob")


def test_a_head_may_be_padded_with_a_token_of_the_adapters_own(tmp_path):
    trained(r=4, target_modules=["q_proj"]).save_pretrained(tmp_path)
    matrices = {EMBEDDINGS: (66, 32), HEAD.replace("lm_head", "score"): (2, 32)}
    more = {name: np.zeros(shape, np.float32) for name, shape in matrices.items()}
    edit_weights(tmp_path, lambda t: t.update(more))
    edit_config(tmp_path, task_type="SEQ_CLS")
    for pad in (65, 66):
        (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": pad}))
        write_blob(tmp_path, tmp_path / str(pad))
    limits = replace(LIMITS, max_added_tokens=2)
    assert read_spec(tmp_path / "65", SHAPE, limits).head.head.pad_token == 65
    with pytest.raises(AdapterRejected, match="padding token 66 is not in the vocabulary of 66"):
        read_spec(tmp_path / "66", SHAPE, limits)


def test_copies_above_a_limit_are_hashes_that_prove_equal_ones_alone(folder):
    alone = write_blob(folder, folder / "alone")
    edit_weights(folder, lambda t: t.update({HEAD: MATRIX, EMBEDDINGS: MATRIX}))
    whole = write_blob(folder, folder / "whole")
    assert write_blob(folder, folder / "fits", most_copied=2 * MATRIX.nbytes) == whole
    assert write_blob(folder, folder / "blob", most_copied=2 * MATRIX.nbytes - 1) not in (
        whole,
        alone,
    )
    assert base_copies(folder / "blob") == base_copies(folder / "whole") != ()
    assert not whole_modules(folder / "blob")
    assert not read_spec(folder / "blob", SHAPE, LIMITS).token_rows
    edit_weights(folder, lambda t: t.update({HEAD: MATRIX[:60]}))
    write_blob(folder, folder / "resized", most_copied=0)
    with pytest.raises(AdapterRejected, match="set LORIKEET_MAX_ADAPTER_BYTES to the size of"):
        read_spec(folder / "resized", SHAPE, LIMITS)


@pytest.mark.parametrize("rows", [63, 66])
@pytest.mark.parametrize("name", [HEAD, EMBEDDINGS])
def test_lora_of_a_resized_vocabulary_is_refused_by_name(rows, name, tmp_path):
    trained(r=4, target_modules=["q_proj", "lm_head"]).save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda t: t.pop(HEAD.replace(".weight", ".base_layer.weight"), None))
    edit_weights(tmp_path, lambda t: t.update({name: np.zeros((rows, 32), np.float32)}))
    write_blob(tmp_path, tmp_path / "blob")
    with pytest.raises(AdapterRejected, match="with a resized vocabulary cannot be") as caught:
        read_spec(tmp_path / "blob", SHAPE, LIMITS)
    assert caught.value.field == name.split(".")[-2]


def test_rows_that_the_base_model_has_too_are_left_out_of_whole_modules(tmp_path):
    model = trained(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
    head = model.get_base_model().lm_head.modules_to_save["default"].weight
    head.data[[7, 40]] += 1
    model.save_pretrained(tmp_path)
    write_blob(tmp_path, tmp_path / "blob")
    bare = model.get_base_model().lm_head.original_module.weight.detach().numpy()
    of_head, _ = sorted(whole_modules(tmp_path / "blob"), key=lambda m: m.module == "embed_tokens")
    assert of_head.dtype == "F32"
    same = row_digests(row.tobytes() for row in bare)
    differ = [i for i in range(64) if same[8 * i :][:8] != of_head.digests[8 * i :][:8]]
    assert differ == [7, 40]
    keep_rows(tmp_path / "blob", tmp_path / "less", {"lm_head": differ, "embed_tokens": []})
    spec = read_spec(tmp_path / "less", SHAPE, LIMITS)
    (part,) = spec.token_rows
    assert (part.name, part.ids) == ("lm_head", (7, 40))
    kept = (tmp_path / "less").read_bytes()[part.rows.begin : part.rows.end]
    assert kept == head.detach().numpy()[[7, 40]].tobytes()
    assert spec.linears[0].a.shape == read_spec(tmp_path / "blob", SHAPE, LIMITS).linears[0].a.shape
    assert whole_modules(tmp_path / "less") == ()
    keep_rows(tmp_path / "blob", tmp_path / "same", {})
    assert (tmp_path / "same").read_bytes() == (tmp_path / "blob").read_bytes()


def test_two_copies_of_one_matrix_are_refused(folder):
    twice = {HEAD: MATRIX, HEAD.replace(".weight", ".base_layer.weight"): MATRIX}
    edit_weights(folder, lambda t: t.update(twice))
    with pytest.raises(AdapterRejected, match="are the same tensor"):
        write_blob(folder, folder / "blob")


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"copies": 3}',
        '{"copies": [3]}',
        '{"copies": [{"module": "norm", "dtype": "F32", "shape": [64, 32], "sha256": "%s"}]}',
        '{"copies": [{"module": "lm_head", "dtype": "U8", "shape": [64, 32], "sha256": "%s"}]}',
        '{"copies": [{"module": "lm_head", "dtype": "F32", "shape": 64, "sha256": "%s"}]}',
        '{"copies": [{"module": "lm_head", "dtype": "F32", "shape": [64, 32], "sha256": "x"}]}',
        '{"copies": [{"module": [], "dtype": "F32", "shape": [64, 32], "sha256": "%s"}]}',
    ],
)
def test_a_blob_with_malformed_copies_is_refused(text, folder):
    write_blob(folder, folder / "blob")
    data = (folder / "blob").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"]["lorikeet_base_copies"] = text.replace("%s", "0" * 64)
    changed = json.dumps(header).encode()
    (folder / "blob").write_bytes(len(changed).to_bytes(8, "little") + changed + data[end:])
    with pytest.raises(AdapterRejected) as caught:
        read_spec(folder / "blob", SHAPE, LIMITS)
    assert caught.value.field == "__metadata__.lorikeet_base_copies"
