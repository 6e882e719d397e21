"""Warnings that an adapter is served with other base weights than in its training."""

import re

import pytest

from lorikeet.base_warning import base_warning

PLAIN, NF4 = "meta-llama/Llama-3.1-8B", "unsloth/Llama-3.1-8B-bnb-4bit"
PARTLY = "unsloth/Llama-3.1-8B-unsloth-bnb-4bit"
FP8, AWQ = "RedHatAI/Llama-3.1-8B-FP8-dynamic", "acme/Llama-3.1-8B-AWQ"


@pytest.mark.parametrize(
    ("trained_on", "quantization"),
    [
        (None, "awq"),
        ("", "awq"),
        *((PLAIN, served) for served in (None, "fp8", "rounded to fp8", "nf4", "gptq")),
        *(
            (NF4, served)
            for served in ("nf4", "nf4, packed", "rounded to nf4", "nf4, rounded to fp8")
        ),
        *((PARTLY, served) for served in ("nf4", "nf4, rounded to fp8")),
        *((FP8, served) for served in ("fp8", "rounded to fp8")),
        (AWQ, "awq"),
    ],
)
def test_base_weights_equal_to_trainings_give_no_warning(trained_on, quantization):
    assert base_warning(trained_on, "llama", quantization) is None


@pytest.mark.parametrize(
    ("trained_on", "quantization", "said"),
    [
        (NF4, None, "LORIKEET_WEIGHT_DTYPE=llama=nf4"),
        (PARTLY, None, "serve that copy, in which some linears were left as they were"),
        (PARTLY, "rounded to nf4", r"llama \(rounded to nf4\), whose values are others"),
        (FP8, None, "a quantised copy, and is served on llama, whose values are others"),
        (FP8, "nf4, rounded to fp8", "whose values are others"),
        (PLAIN, "awq", "AWQ scales what linears read"),
        (PLAIN, "awq, rounded to fp8", "AWQ scales what linears read"),
        (PLAIN, "awq, packed", "AWQ scales what linears read"),
        (NF4, "awq", r"served on llama \(awq\), whose values are others"),
    ],
)
def test_a_warning_names_the_difference_and_the_remedy(trained_on, quantization, said):
    assert re.search(said, base_warning(trained_on, "llama", quantization) or "")
