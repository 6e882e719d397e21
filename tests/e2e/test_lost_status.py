"""Gateways without status updates of replicas, which learn adapters' locations from answers."""

import time
from collections import Counter

import pytest

from tests.e2e.conftest import REPLICAS
from tests.e2e.faulty_replica import faults
from tests.e2e.load import Load, hit_rate
from tests.e2e.service_processes import complete

ADAPTERS = 12
EACH = 5  # requests for each adapter
FORGOTTEN_S = 4.0  # by then the last status that a gateway received is stale


@pytest.mark.parametrize(
    "lost",
    [
        {"stats": "hang", "feed": "raise"},
        pytest.param({"stats": "raise", "feed": "hang"}, marks=pytest.mark.soak),
        pytest.param({"stats": "raise"}, marks=pytest.mark.soak),
        pytest.param({"feed": "raise"}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_requests_find_their_adapters_though_status_updates_are_lost(service, crowd, lost):
    assert complete(service)
    adapters = crowd.adapters(ADAPTERS)
    with faults(**lost):
        time.sleep(FORGOTTEN_S)
        with Load(service.url, adapters, streams=8) as load:
            load.wait_for(ADAPTERS * EACH)
    assert load.unfinished() == []
    places = {(result.model, result.replica) for result in load.results}
    assert ADAPTERS <= len(places) < (ADAPTERS + pairs_by_chance(load.results)) / 2
    with Load(service.url, adapters, streams=8) as after:
        after.wait_for(2 * ADAPTERS)
    assert after.unfinished() == []
    assert hit_rate(after.results) > 0.8


def pairs_by_chance(results):
    """Expected number of (adapter, replica) pairs if each request went to a random replica."""
    asked = Counter(result.model for result in results)
    return sum(REPLICAS * (1 - (1 - 1 / REPLICAS) ** times) for times in asked.values())
