"""Every family with every way to hold it and every feature answers as transformers and PEFT do.

A family is a row (FAMILIES of tests/engine/conftest.py), a way to hold its weights or its KV cache,
or two processes that share them, a column (STORAGES), what can happen to a request another one
(FEATURES). Each storage of each family is one engine, started once.
"""

import pytest

from tests.engine.conftest import FAMILIES
from tests.engine.matrix.reference import SavedFamily, StoredReference
from tests.engine.matrix.storages import STORAGES
from tests.engine.matrix.traffic import ADAPTERS, FEATURES, answers_of, assert_equal

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tiny_checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return SavedFamily(tiny_checkpoints[request.param], folder, ADAPTERS)


@pytest.fixture(scope="module", params=STORAGES)
def served(request, family, tmp_path_factory):
    """The answers of an engine, and the reference for them."""
    storage = STORAGES[request.param]
    answers = answers_of(family, storage, tmp_path_factory.mktemp("cache"))
    return answers, StoredReference(family, storage)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_cell_is_equal_to_its_reference(served, feature):
    answers, reference = served
    shown = [answer for answer in answers if FEATURES[feature](answer)]
    assert shown
    for answer in shown:
        assert_equal(answer, reference)
