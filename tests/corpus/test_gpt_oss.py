"""Every form of an adapter of gpt-oss is served as PEFT computes it, or refused by name."""

import pytest

from tests.corpus.bases import Base
from tests.corpus.gpt_oss import FAMILY, gpt_oss_cases
from tests.corpus.register import register
from tests.corpus.test_hybrids import built, check_no_mutation_is_silent, judge

SERVED = [case for case in gpt_oss_cases() if not case.says]


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    return {FAMILY: Base.save(FAMILY, tmp_path_factory.mktemp(FAMILY) / "model")}


@pytest.mark.parametrize("case", gpt_oss_cases(), ids=lambda case: case.name)
def test_every_form_of_gpt_oss_is_equal_to_peft_or_refused_by_name(case, bases, tmp_path):
    draft = judge(case, bases, tmp_path)
    if not case.says:
        check_no_mutation_is_silent(draft, mutations=1)


@pytest.mark.soak
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_no_folder_of_gpt_oss_that_lost_a_tensor_is_served(case, bases, tmp_path):
    draft = built(case, bases, tmp_path)
    register(draft)
    check_no_mutation_is_silent(draft, mutations=None)
