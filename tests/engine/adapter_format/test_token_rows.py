"""Trained tokens as PEFT saves them: accepted, or refused by name."""

import copy
from dataclasses import replace

import peft
import pytest
import torch
from transformers import LlamaForCausalLM

from lorikeet_engine.adapter_format import AdapterLimits, check_values, read_spec, write_blob
from lorikeet_engine.errors import AdapterRejected, AdapterTooLarge
from lorikeet_engine.residency.blob_packing import pack
from lorikeet_engine.residency.packed_image import PackedLayout
from tests.engine.adapter_format.peft_folder import edit_config, edit_weights
from tests.engine.tiny_llama import CONFIG, SHAPE

LIMITS = AdapterLimits(max_rank=16, max_bytes=1 << 20)
TIED = replace(SHAPE, tied=True)
ROWS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


def save(folder, tokens, **options):
    """A PEFT folder with random rows, and the rows of its model."""
    options = {"r": 4, "target_modules": ["q_proj"]} | options
    model = peft.get_peft_model(
        LlamaForCausalLM(copy.deepcopy(CONFIG)),
        peft.LoraConfig(trainable_token_indices=tokens, **options),
    )
    rows = {}
    for name, weight in model.named_parameters():
        if "trainable_tokens_delta" in name:
            weight.data.normal_()
            rows["lm_head" if "lm_head" in name else "embed_tokens"] = weight.detach().clone()
    model.save_pretrained(folder)
    return rows


def accept(folder, shape=SHAPE):
    write_blob(folder, folder / "blob")
    spec = read_spec(folder / "blob", shape, LIMITS)
    check_values(folder / "blob", spec, "float32")
    return spec


def test_rows_and_ids_are_in_the_image_and_count_as_changed(tmp_path):
    saved = save(tmp_path, {"embed_tokens": [40, 3, 17], "lm_head": [5]})
    spec = accept(tmp_path)
    assert {part.name: part.ids for part in spec.token_rows} == {
        "embed_tokens": (40, 3, 17),
        "lm_head": (5,),
    }
    assert spec.touches.tokens == 4
    layout = PackedLayout.of(spec, SHAPE)
    assert (layout.elements, layout.max_rank) == (spec.packed_elements(SHAPE.dims), 4)
    assert (layout.head_rank, layout.head_rows) == (0, 1)
    image = torch.zeros(layout.elements)
    pack(tmp_path / "blob", spec, layout, image)
    for part in spec.token_rows:
        at, ids_at, count = layout.rows[SHAPE.outer_layer, part.linear].tolist()
        assert torch.equal(image[at:][: count * SHAPE.hidden], saved[part.name].flatten())
        digits = image[ids_at:][: 3 * count].view(count, 3)
        assert (digits @ torch.tensor([1.0, 256.0, 65536.0])).tolist() == list(part.ids)


def test_a_tied_head_uses_the_embeddings_rows_which_are_stored_once(tmp_path):
    save(tmp_path, [40, 3])
    spec = accept(tmp_path, TIED)
    layout = PackedLayout.of(spec, TIED)
    head, embeddings = layout.rows[-1, -3:-1].tolist()
    assert head == embeddings
    assert head[2] == layout.head_rows == 2
    assert layout.elements == spec.packed_elements(TIED.dims)
    ranks = enumerate(layout.rows[..., 2].flatten().tolist())
    again = {divmod(at, len(TIED.modules)): rank for at, rank in ranks}
    assert torch.equal(PackedLayout.of_ranks(again, TIED).rows, layout.rows)


def test_a_listed_head_may_be_without_rows_if_it_is_tied(tmp_path):
    save(tmp_path, [40, 3])
    edit_config(tmp_path, trainable_token_indices={"embed_tokens": [40, 3], "lm_head": [40, 3]})
    assert len(accept(tmp_path, TIED).token_rows) == 1
    with pytest.raises(AdapterRejected, match="of lm_head: its rows are not in the file"):
        accept(tmp_path)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1], "are \\[2, 32\\], not \\[1, 32\\]"),
        ([1, 1], "different token ids"),
        ([1, -2], "different token ids"),
        ([1, True], "different token ids"),
        ([1, 64], "token 64 is not in the base model's vocabulary of 64"),
        ([], "names no trained tokens"),
        ({"lm_head": [1, 2]}, "names no trained tokens"),
        ({"q_proj": [1, 2]}, "want tokens of embed_tokens or of lm_head"),
        ({"embed_tokens": [1, 2], "lm_head": [4]}, "rows of lm_head are not in the file"),
    ],
)
def test_the_configs_tokens_must_match_the_file(tokens, says, tmp_path):
    save(tmp_path, [40, 3])
    edit_config(tmp_path, trainable_token_indices=tokens)
    with pytest.raises(AdapterRejected, match=says):
        accept(tmp_path)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_refused(value, tmp_path):
    save(tmp_path, [40, 3])

    def spoil(tensors):
        tensors[ROWS][1, 5] = value

    edit_weights(tmp_path, spoil)
    with pytest.raises(AdapterRejected, match=r"embed_tokens\.trainable_tokens_delta holds NaN"):
        accept(tmp_path)


def test_modules_changed_twice_are_refused(tmp_path):
    save(tmp_path, [40, 3], target_modules=["lm_head"])
    assert accept(tmp_path).token_rows
    with pytest.raises(AdapterRejected, match="of lm_head: it has LoRA, too"):
        accept(tmp_path, TIED)


def test_more_tokens_than_the_limit_are_refused(tmp_path):
    save(tmp_path, [40, 3])
    edit_config(tmp_path, trainable_token_indices=list(range(257)))
    with pytest.raises(AdapterTooLarge, match="257 trained tokens in one module: the limit is 256"):
        accept(tmp_path)
