"""Limits bound what runs at once, and nothing else."""

from contextlib import ExitStack

import pytest

from lorikeet.errors import RateLimited
from lorikeet.tenancy import Admission


def refused(admission: Admission, tenant: str, limit: int | None) -> RateLimited:
    with pytest.raises(RateLimited) as raised, admission.admit(tenant, limit):
        pass
    return raised.value


def test_what_is_over_the_limit_is_refused_with_a_time_to_retry() -> None:
    admission = Admission()
    for _ in range(2):  # places come back
        with admission.admit("acme", 2), admission.admit("acme", 2):
            error = refused(admission, "acme", 2)
            assert error.limit == 2
            assert error.retry_after_s is not None


def test_a_place_comes_back_when_the_request_fails() -> None:
    admission = Admission()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), admission.admit("acme", 1):
            raise ZeroDivisionError


def test_a_place_is_taken_when_it_is_entered_and_not_before() -> None:
    admission = Admission()
    place = admission.admit("acme", 1)
    with admission.admit("acme", 1):
        pass
    with place:
        refused(admission, "acme", 1)


def test_tenants_do_not_share_places() -> None:
    admission = Admission()
    with admission.admit("acme", 1), admission.admit("globex", 1):
        refused(admission, "acme", 1)
        refused(admission, "globex", 1)


def test_without_a_limit_everything_runs() -> None:
    admission = Admission()
    with ExitStack() as places:
        for _ in range(1000):
            places.enter_context(admission.admit("acme", None))


@pytest.mark.parametrize(("limit", "gateways", "share"), [(8, 2, 4), (7, 2, 3), (1, 4, 1)])
def test_each_gateway_has_its_share_and_at_least_one(limit: int, gateways: int, share: int) -> None:
    admission = Admission(gateways)
    with ExitStack() as places:
        for _ in range(share):
            places.enter_context(admission.admit("acme", limit))
        refused(admission, "acme", limit)


def test_a_lowered_limit_counts_for_the_next_request() -> None:
    admission = Admission()
    with admission.admit("acme", 5), admission.admit("acme", 5):
        refused(admission, "acme", 1)


def test_all_tenants_together_stay_within_what_a_gateway_carries() -> None:
    admission = Admission(most=3)
    with admission.admit("acme", None), admission.admit("globex", 9):
        with admission.admit("acme", 9):
            for tenant, limit in (("acme", None), ("globex", 9), ("initech", 1)):
                error = refused(admission, tenant, limit)
                assert error.limit == 3
                assert error.retry_after_s is not None
        with admission.admit("initech", 1):  # the place that came back is anyone's
            refused(admission, "acme", None)
