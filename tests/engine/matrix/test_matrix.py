"""Answers equal transformers' and PEFT's for every family, storage and feature of requests.

A cell of the matrix is one engine: a family (FAMILIES and MOE of tests/engine/conftest.py) with a
storage (STORAGES), in which every feature of requests (FEATURES) occurs. `make test` tries every
family in floats, and each storage with the few families of OFTEN; `make soak` tries the others.
"""

from statistics import median_low

import pytest

from tests.engine.conftest import FAMILIES, MOE
from tests.engine.matrix.reference import SavedFamily, StoredReference
from tests.engine.matrix.storages import EXACT, STORAGES
from tests.engine.matrix.traffic import ADAPTERS, FEATURES, answers_of, assert_equal
from tests.engine.moe_adapters import BOTH

pytestmark = pytest.mark.usefixtures("one_thread", "forked_followers")
MOE_ADAPTERS = ADAPTERS | {
    "all_linears": ADAPTERS["all_linears"] | {"target_parameters": BOTH},
}
EVERY = (*FAMILIES, *MOE)
# Families of the storages that not every family is tried with. Experts are not rounded to NF4.
# Gemma 3 has every norm there is, Phi 3 stores several linears as one, Granite's keys have a gain.
SOME = {
    "nf4_weights": tuple(FAMILIES),
    "fp8_of_two_ranks": ("llama", *MOE),
    "fp8_channels": ("llama", "mistral", *MOE),
    "fp8_matrices": ("qwen2", *MOE),
    "fp8_blocks": ("gemma3_text", *MOE),
    "fp8_blocks_of_two_ranks": ("phi3", *MOE),
    "fp8_kv_of_two_ranks": ("granite",),
}
# Each family meets a storage beside floats, and most storages meet two families.
OFTEN = {
    "floats": EVERY,
    "fp8_weights": ("qwen3", "olmo3"),
    "nf4_weights": ("qwen2", "glm4"),
    "fp8_kv": ("ministral", "gemma2"),
    "two_ranks": ("smollm3", "olmo2", "seed_oss"),
    "fp8_of_two_ranks": ("llama", "mixtral"),
    "fp8_channels": ("mistral",),
    "fp8_matrices": ("qwen3_moe",),
    "fp8_blocks": ("gemma3_text", "mixtral"),
    "fp8_blocks_of_two_ranks": ("phi3", "qwen3_moe"),
    "fp8_kv_of_two_ranks": ("granite",),
}
CELLS = [
    pytest.param(
        family, storage, marks=[] if family in OFTEN.get(storage, ()) else pytest.mark.soak
    )
    for family in EVERY
    for storage in STORAGES
    if family in SOME.get(storage, EVERY)
]


@pytest.fixture(scope="module")
def family(request, tiny_checkpoints, tmp_path_factory):
    adapters = MOE_ADAPTERS if request.param in MOE else ADAPTERS
    folder = tmp_path_factory.mktemp(request.param)
    return SavedFamily(tiny_checkpoints[request.param], folder, adapters)


@pytest.fixture(scope="module")
def served(request, family, tmp_path_factory):
    """Answers of an engine, and the reference for them."""
    storage, folder = STORAGES[request.param], tmp_path_factory.mktemp("cache")
    checkpoint, weights = storage.stored(family.checkpoint, folder)
    answers = answers_of(family, storage, checkpoint, folder)
    return answers, StoredReference(family, storage, weights)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("family", "served"), CELLS, indirect=True, scope="module")
def test_an_engine_answers_as_its_reference_does(served, feature):
    answers, reference = served
    shown = [answer for answer in answers if FEATURES[feature](answer)]
    assert shown
    errors = [assert_equal(answer, reference) for answer in shown]
    if len(errors) > 2:
        # One number that is rounded the other way changes all of an answer behind it.
        assert median_low(errors) <= EXACT.median, "such numbers are rare"


def test_make_test_tries_every_family_with_floats_and_another_storage():
    assert OFTEN.keys() == STORAGES.keys()
    assert all(set(OFTEN[name]) <= set(SOME.get(name, EVERY)) for name in STORAGES)
    assert OFTEN["floats"] == EVERY
    assert {family for name in OFTEN if name != "floats" for family in OFTEN[name]} == set(EVERY)
