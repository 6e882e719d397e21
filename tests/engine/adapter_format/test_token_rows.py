"""Trained tokens as PEFT saves them: accepted, or refused by name."""

import copy
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
from transformers import LlamaForCausalLM

from lorikeet_engine.adapter_format import AdapterLimits, check_values, read_spec, write_blob
from lorikeet_engine.errors import AdapterRejected, AdapterTooLarge
from lorikeet_engine.residency.blob_packing import pack
from lorikeet_engine.residency.packed_image import PackedLayout
from tests.engine.adapter_format.peft_folder import edit_config, edit_weights
from tests.engine.tiny_llama import CONFIG, SHAPE, trained

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
        ascending = torch.tensor(part.ids).argsort()
        want = saved[part.name][ascending].flatten()
        assert torch.equal(image[at:][: count * SHAPE.hidden], want)
        digits = image[ids_at:][: 3 * count].view(count, 3)
        assert (digits @ torch.tensor([1.0, 256.0, 65536.0])).tolist() == sorted(part.ids)


def test_a_tied_head_has_the_embeddings_rows(tmp_path):
    save(tmp_path, [40, 3])
    spec = accept(tmp_path, TIED)
    head, embeddings = spec.token_rows
    assert head.rows == embeddings.rows
    assert spec.touches.parameters == accept(tmp_path).touches.parameters
    layout = PackedLayout.of(spec, TIED)
    assert layout.head_rows == 2
    assert layout.elements == spec.packed_elements(TIED.dims)


def test_a_listed_head_may_be_without_rows_if_it_is_tied(tmp_path):
    save(tmp_path, [40, 3])
    edit_config(tmp_path, trainable_token_indices={"embed_tokens": [40, 3], "lm_head": [40, 3]})
    assert len(accept(tmp_path, TIED).token_rows) == 2
    with pytest.raises(AdapterRejected, match="of lm_head: its rows are not in the file"):
        accept(tmp_path)


def whole(folder, **options):
    """A PEFT folder with random whole modules."""
    model = trained(r=4, target_modules=["q_proj"], **options)
    for name, weight in model.named_parameters():
        if "modules_to_save" in name:
            weight.data.normal_()
    model.save_pretrained(folder)


@pytest.mark.parametrize("shape", [SHAPE, TIED])
@pytest.mark.parametrize(
    "names", [["lm_head"], ["model.embed_tokens"], ["embed_tokens", "lm_head"]]
)
def test_whole_modules_are_rows_of_all_tokens_even_if_the_base_model_ties_them(
    names, shape, tmp_path
):
    whole(tmp_path, modules_to_save=names)
    spec = accept(tmp_path, shape)
    assert {part.name for part in spec.token_rows} == {n.rpartition(".")[2] for n in names}
    assert all(part.ids == range(64) for part in spec.token_rows)
    layout = PackedLayout.of(spec, shape)
    assert layout.elements == spec.packed_elements(shape.dims)
    assert layout.head_rows == (64 if "lm_head" in names else 0)


@pytest.mark.parametrize("rows", [63, 66])
def test_a_whole_module_may_have_fewer_rows_and_more_if_the_engine_takes_them(rows, tmp_path):
    whole(tmp_path, modules_to_save=["lm_head"])
    head = "base_model.model.lm_head.weight"
    edit_weights(tmp_path, lambda t: t.update({head: np.zeros((rows, 32), np.float32)}))
    if rows < SHAPE.vocabulary:
        (part,) = accept(tmp_path).token_rows
        assert part.ids == range(rows)
        return
    with pytest.raises(AdapterRejected, match="LORIKEET_MAX_ADDED_TOKENS, now 0, to at least 2"):
        accept(tmp_path)


def test_a_module_trained_whole_and_in_parts_is_refused(tmp_path):
    save(tmp_path, {"lm_head": [40, 3]})
    matrix = np.zeros((64, 32), np.float32)
    edit_weights(tmp_path, lambda t: t.update({"base_model.model.lm_head.weight": matrix}))
    edit_config(tmp_path, modules_to_save=["lm_head"])
    with pytest.raises(AdapterRejected, match="lm_head: they are trained in two ways"):
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
    with pytest.raises(AdapterRejected, match=r"embed_tokens\.weight holds NaN"):
        accept(tmp_path)


def test_modules_changed_twice_are_refused(tmp_path):
    save(tmp_path, [40, 3], target_modules=["lm_head"])
    assert accept(tmp_path).token_rows
    with pytest.raises(AdapterRejected, match="of lm_head: it has LoRA, too"):
        accept(tmp_path, TIED)


def test_more_tokens_than_the_limit_are_refused(tmp_path):
    save(tmp_path, [40, 3])
    edit_config(tmp_path, trainable_token_indices=list(range(65_537)))
    with pytest.raises(
        AdapterTooLarge, match="65537 trained tokens in one module: the limit is 65"
    ):
        accept(tmp_path)
