"""Malformed blobs through the admin API are refused with a reason, and the service goes on."""

import re
from collections.abc import Iterator

import pytest

from tests.engine import malformed
from tests.engine.malformed_blobs import blob_cases
from tests.gateway.conftest import LIMITS, SHAPE, Gateway, make_blob
from tests.gateway.test_bad_requests import error_of

CASES = [case for case in blob_cases() if "78 MB" not in case.name][::4]


@pytest.fixture(scope="module", autouse=True)
def nothing_was_let_in(
    unchanged: Gateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    assert (malformed.SHAPE, malformed.LIMITS) == (SHAPE, LIMITS)
    before = unchanged.admin("GET", "/adapters").json()
    yield
    assert unchanged.admin("GET", "/adapters").json() == before
    good = make_blob(tmp_path_factory.mktemp("good"), seed=77)
    assert unchanged.upload("acme/good", good).status_code == 201


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_malformed_blob_is_refused_by_name(case: malformed.Case, unchanged: Gateway) -> None:
    data = case.files()[malformed.BLOB]
    answer = unchanged.upload("acme/bad", data)
    if len(data) > LIMITS.max_bytes:
        assert error_of(answer, 413)["code"] == "request_too_large"
        return
    error = error_of(answer, 422)
    assert error["code"] == "invalid_adapter"
    assert re.search(case.says, error["message"]), error["message"]
    assert "/tmp" not in error["message"]
