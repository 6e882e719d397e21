"""Users' adapters are served as PEFT computes them, or refused by an error that names the fault."""

import re

import pytest
import torch

from tests.corpus.cases import COUNT, Case, each_once, five_hundred
from tests.corpus.mixtures import mixture_cases
from tests.corpus.reference import reference
from tests.corpus.register import Refusal, register
from tests.corpus.served import PROMPT, packed_deltas
from tests.corpus.table import FEATURES

# Tolerance of log probabilities, between two orders of float32 additions.
TOLERANCE = 1e-3


@pytest.mark.parametrize("case", each_once(), ids=lambda case: case.name)
def test_every_feature_is_equal_to_peft_or_refused_by_name(case, stand, draft_of):
    judge(case, stand, draft_of)


@pytest.mark.soak
@pytest.mark.parametrize("case", five_hundred(), ids=lambda case: case.name)
def test_five_hundred_adapters_are_equal_to_peft_or_refused_by_name(case, stand, draft_of):
    judge(case, stand, draft_of)


@pytest.mark.parametrize("case", mixture_cases(), ids=lambda case: case.name)
def test_adapters_of_a_mixture_are_equal_to_peft_or_refused_by_name(case, stand, draft_of):
    judge(case, stand, draft_of)


def test_the_cases_cover_every_feature_of_the_table():
    names = [feature.name for feature in FEATURES]
    assert len(names) == len(set(names)) >= 60
    assert {f.name for case in each_once() for f in case.features} == set(names)
    cases = five_hundred()
    assert len(cases) == COUNT == len({case.name for case in cases})


def judge(case: Case, stand, draft_of) -> None:
    draft = draft_of(case.family, case.rank, case.seed)
    case.build(draft)
    if case.says:
        with pytest.raises(Refusal) as caught:
            register(draft)
        assert re.search(case.says, caught.value.message), caught.value.message
    else:
        check_served_as_by_peft(case, stand(case.family), draft)


def check_served_as_by_peft(case: Case, stand, draft) -> None:
    """Compare each module's delta, and a batch with another adapter and the base, with PEFT's."""
    blob = register(draft)
    said = stand.served.answers({"case": blob, "beside": stand.beside_blob, "base": None})
    deltas = packed_deltas(blob, stand.base.shape)
    peft = reference(stand.base, draft.truth)
    wanted = peft.deltas()
    assert deltas.keys() == wanted.keys()
    for module, want in wanted.items():
        torch.testing.assert_close(deltas[module], want, rtol=1e-4, atol=1e-5, msg=module)
    check_close(said["case"], peft)
    check_close(said["beside"], stand.plain_reference)
    check_close(said["base"], stand.base_reference)
    changed = (said["case"].logprobs[0] - said["base"].logprobs[0]).abs().max()
    assert case.silent or changed >= 10 * TOLERANCE, f"log-probabilities change by {changed}"


def check_close(answer, model) -> None:
    """Check that the same tokens are the likeliest, and that all log probabilities are close."""
    want = model.logprobs(PROMPT, answer.tokens[:-1])[len(PROMPT) - 1 :]
    torch.testing.assert_close(answer.logprobs, want, rtol=0, atol=TOLERANCE)
    assert answer.tokens == want.argmax(-1).tolist()
