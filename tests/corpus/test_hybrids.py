"""Every form of an adapter of hybrids is served as PEFT computes it, or refused by name."""

import re
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import MLX_WEIGHTS_FILE, WEIGHTS_FILE
from tests.corpus.bases import Base
from tests.corpus.draft import Draft
from tests.corpus.hybrids import ALL, each_form, hybrid_cases
from tests.corpus.reference import reference
from tests.corpus.register import Refusal, register
from tests.corpus.served import packed_deltas

SERVED = [case for case in hybrid_cases() if not case.says]
_ENCODERS = (".visual.", "vision_tower.", "audio_tower.", "embed_vision.")


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrids")
    return {family: Base.save(family, folder / family / "model") for family in ALL}


def built(case, bases, folder: Path) -> Draft:
    draft = Draft(bases[case.family], folder, case.rank, case.seed)
    case.build(draft)
    return draft


def judge(case, bases, folder) -> Draft:
    """Check that a case is refused by name, or has the deltas of PEFT; return its draft."""
    draft = built(case, bases, folder)
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


@pytest.mark.parametrize("case", each_form(), ids=lambda case: case.name)
def test_every_form_of_a_hybrid_is_equal_to_peft_or_refused_by_name(case, bases, tmp_path):
    draft = judge(case, bases, tmp_path)
    if not case.says:
        check_no_mutation_is_silent(draft, mutations=1)


@pytest.mark.soak
@pytest.mark.parametrize("case", hybrid_cases(), ids=lambda case: case.name)
def test_every_form_of_every_hybrid_is_equal_to_peft_or_refused_by_name(case, bases, tmp_path):
    judge(case, bases, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_no_folder_of_a_hybrid_that_lost_a_tensor_is_served(case, bases, tmp_path):
    draft = built(case, bases, tmp_path)
    register(draft)
    check_no_mutation_is_silent(draft, mutations=None)


def test_the_forms_of_hybrids_are_sixty_folders_and_more():
    names = [case.name for case in hybrid_cases()]
    assert len(names) == len(set(names)) >= 60
