"""Every form of an adapter of newer families is served as PEFT computes it, or refused by name."""

import pytest

from tests.corpus.bases import Base
from tests.corpus.new_families import ALL, cases, each_form
from tests.corpus.register import register
from tests.corpus.test_hybrids import built, check_no_mutation_is_silent, judge

SERVED = [case for case in cases() if not case.says]


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("new_families")
    return {family: Base.save(family, folder / family / "model") for family in ALL}


@pytest.mark.parametrize("case", each_form(), ids=lambda case: case.name)
def test_every_form_of_a_newer_family_is_equal_to_peft_or_refused_by_name(case, bases, tmp_path):
    draft = judge(case, bases, tmp_path)
    if not case.says:
        check_no_mutation_is_silent(draft, mutations=1)


@pytest.mark.soak
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_form_of_every_newer_family_is_equal_to_peft_or_refused(case, bases, tmp_path):
    judge(case, bases, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_no_folder_of_a_newer_family_that_lost_a_tensor_is_served(case, bases, tmp_path):
    draft = built(case, bases, tmp_path)
    register(draft)
    check_no_mutation_is_silent(draft, mutations=None)


def test_the_forms_of_newer_families_are_a_hundred_folders_and_more():
    names = [case.name for case in cases()]
    assert len(names) == len(set(names)) >= 100
