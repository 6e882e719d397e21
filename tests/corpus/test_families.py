"""Every form of an adapter of gpt-oss, hybrids and newer families is served as PEFT computes it, or
refused by name.
"""

import re
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import MLX_WEIGHTS_FILE, WEIGHTS_FILE
from tests.corpus import gpt_oss, hybrids, new_families
from tests.corpus.bases import Base
from tests.corpus.cases import each_form
from tests.corpus.draft import Draft
from tests.corpus.reference import reference
from tests.corpus.register import Refusal, register
from tests.corpus.served import packed_deltas

GROUPS = (gpt_oss.CASES, hybrids.CASES, new_families.CASES)
EVERY = [case for cases in GROUPS for case in cases]
_ENCODERS = (".visual.", "vision_tower.", "audio_tower.", "embed_vision.")


@pytest.fixture(scope="session")
def base_of(tmp_path_factory):
    """Return a function that saves a family's base model once."""
    folder = tmp_path_factory.mktemp("families")
    return cache(lambda family: Base.save(family, folder / family / "model"))


def built(case, base_of, folder: Path) -> Draft:
    draft = Draft(base_of(case.family), folder, case.rank, case.seed)
    case.build(draft)
    return draft


def judge(case, base_of, folder) -> Draft:
    """Check that a case is refused by name, or has the deltas of PEFT; return its draft."""
    draft = built(case, base_of, folder)
    if case.says:
        with pytest.raises(Refusal) as caught:
            register(draft)
        assert re.search(case.says, caught.value.message), caught.value.message
        return draft
    got = packed_deltas(register(draft), draft.base.shape)
    wanted = reference(draft.base, draft.truth).deltas()
    assert got.keys() == wanted.keys()
    for module, want in wanted.items():
        torch.testing.assert_close(got[module], want, rtol=1e-4, atol=1e-5, msg=module)
    return draft


def check_no_mutation_is_silent(draft: Draft, mutations: int | None) -> None:
    """Check that a folder is refused if a LoRA tensor of the language model is lost or renamed.

    mutations: tensors to choose; None: all of them.
    """
    name = MLX_WEIGHTS_FILE if (draft.folder / MLX_WEIGHTS_FILE).exists() else WEIGHTS_FILE
    whole = load_file(draft.folder / name)
    of_text = [n for n in whole if not any(part in n for part in (*_ENCODERS, "base_layer"))]
    chosen = of_text if mutations is None else Random(draft.seed).sample(of_text, mutations)
    for tensor in chosen:
        kept = {n: t for n, t in whole.items() if n != tensor}
        module, _, side = tensor.rpartition(".lora_")
        other = f"{module}_x.lora_{side}" if module else f"{tensor}_x"
        for spoilt in (kept, kept | {other: whole[tensor]}):
            save_file(spoilt, draft.folder / name)
            with pytest.raises(Refusal):
                register(draft)


@pytest.mark.parametrize(
    "case", [case for cases in GROUPS for case in each_form(cases)], ids=lambda case: case.name
)
def test_every_form_is_equal_to_peft_or_refused_by_name(case, base_of, tmp_path):
    draft = judge(case, base_of, tmp_path)
    if not case.says:
        check_no_mutation_is_silent(draft, mutations=1)


@pytest.mark.soak
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_every_form_of_every_family_is_equal_to_peft_or_refused_by_name(case, base_of, tmp_path):
    judge(case, base_of, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(
    "case", [case for case in EVERY if not case.says], ids=lambda case: case.name
)
def test_no_folder_that_lost_a_tensor_is_served(case, base_of, tmp_path):
    draft = built(case, base_of, tmp_path)
    register(draft)
    check_no_mutation_is_silent(draft, mutations=None)


def test_the_forms_are_three_hundred_folders_and_more():
    names = [case.name for case in EVERY]
    assert len(names) == len(set(names)) >= 300
