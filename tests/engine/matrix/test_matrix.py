"""Every family with every way to hold it and every feature answers as transformers and PEFT do.

A family is a row (FAMILIES and MOE of tests/engine/conftest.py), a way to hold its weights or its
KV cache, or two processes that share them, a column (STORAGES), what can happen to a request
another one (FEATURES). Each storage of each family is one engine, started once. Experts are not
rounded to NF4, and two processes share FP8 weights of one dense family and of mixtures of experts,
and an FP8 KV cache of one family whose keys have a gain. FP8 whose blocks have scales is that of
mixtures of experts, of a family with every norm there is, and in two processes of one that stores
several linears as one.
"""

from statistics import median

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
SOME = {
    "nf4_weights": FAMILIES,
    "fp8_of_two_ranks": ("llama", *MOE),
    "fp8_blocks": ("gemma3_text", *MOE),
    "fp8_blocks_of_two_ranks": ("phi3", *MOE),
    "fp8_kv_of_two_ranks": ("granite",),
}
CELLS = [
    (family, storage)
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
    """The answers of an engine, and the reference for them."""
    storage = STORAGES[request.param]
    answers = answers_of(family, storage, tmp_path_factory.mktemp("cache"))
    return answers, StoredReference(family, storage)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("family", "served"), CELLS, indirect=True, scope="module")
def test_a_cell_is_equal_to_its_reference(served, feature):
    answers, reference = served
    shown = [answer for answer in answers if FEATURES[feature](answer)]
    assert shown
    errors = [assert_equal(answer, reference) for answer in shown]
    if len(errors) > 2:
        assert median(errors) <= EXACT.median, "what rounding decides otherwise is seldom"
