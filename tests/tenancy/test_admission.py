"""A tenant's limit bounds what runs at once, and nothing else."""

from contextlib import ExitStack

import pytest

from lorikeet.errors import RateLimited
from lorikeet.tenancy import Admission


def test_what_is_over_the_limit_is_refused_with_a_time_to_retry() -> None:
    admission = Admission()
    with admission.admit("acme", 2), admission.admit("acme", 2):
        with pytest.raises(RateLimited) as refused, admission.admit("acme", 2):
            pass
        assert refused.value.limit == 2
        assert refused.value.retry_after_s is not None
        assert admission.running("acme") == 2
    assert admission.running("acme") == 0


def test_a_place_comes_back_when_the_request_fails() -> None:
    admission = Admission()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), admission.admit("acme", 1):
            raise ZeroDivisionError
    assert admission.running("acme") == 0


def test_a_place_is_taken_when_it_is_entered_and_not_before() -> None:
    admission = Admission()
    place = admission.admit("acme", 1)
    assert admission.running("acme") == 0
    with place:
        assert admission.running("acme") == 1


def test_tenants_do_not_share_places() -> None:
    admission = Admission()
    with admission.admit("acme", 1), admission.admit("globex", 1):
        assert admission.running("acme") == admission.running("globex") == 1


def test_without_a_limit_everything_runs() -> None:
    admission = Admission()
    with ExitStack() as places:
        for _ in range(1000):
            places.enter_context(admission.admit("acme", None))
        assert admission.running("acme") == 1000


@pytest.mark.parametrize(("limit", "gateways", "share"), [(8, 2, 4), (7, 2, 3), (1, 4, 1)])
def test_each_gateway_has_its_share_and_at_least_one(limit: int, gateways: int, share: int) -> None:
    admission = Admission(gateways)
    with ExitStack() as places:
        for _ in range(share):
            places.enter_context(admission.admit("acme", limit))
        with pytest.raises(RateLimited):
            places.enter_context(admission.admit("acme", limit))


def test_a_lowered_limit_counts_for_the_next_request() -> None:
    admission = Admission()
    with (
        admission.admit("acme", 5),
        admission.admit("acme", 5),
        pytest.raises(RateLimited),
        admission.admit("acme", 1),
    ):
        pass
