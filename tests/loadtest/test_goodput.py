"""Traffic of the goodput benchmark, and its search for the highest good rate."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from loadtest.bench_goodput import Traffic, search
from loadtest.real_service.adapters import model_name

ORDER = np.random.default_rng(0).permutation(100)


def test_traffic_arrives_at_the_rate_within_the_context_and_falls_by_zipfs_law():
    sessions = Traffic(ORDER, context=2048).sessions(rate_per_s=50, seconds=60, seed=1)
    requests = [session.requests[0] for session in sessions]
    assert len(sessions) == pytest.approx(3000, rel=0.1)
    assert all(a.at_s <= b.at_s < 60 for a, b in pairwise(sessions))
    assert all(request.prompt_tokens + request.output_tokens <= 2048 for request in requests)
    assert len({request.seed for request in requests}) == len(requests)
    asked = Counter(request.model for request in requests)
    share = asked[model_name(int(ORDER[0]))] / len(requests)
    assert share == pytest.approx(1 / sum(1 / k for k in range(1, 101)), rel=0.2)
    assert sessions == Traffic(ORDER, context=2048).sessions(50, 60, 1)
    assert sessions != Traffic(ORDER, context=2048).sessions(50, 60, 2)


def test_the_warm_up_requests_every_adapter_once_and_the_most_popular_last():
    sessions = Traffic(ORDER, context=2048).warm_up()
    asked = [request.model for session in sessions for request in session.requests]
    assert sorted(asked) == sorted(map(model_name, range(100)))
    last = {session.requests[-1].model for session in sessions}
    assert {model_name(int(adapter)) for adapter in ORDER[:30]} <= last


@pytest.mark.parametrize(
    ("most", "rates"),
    [
        (20.0, [8, 12, 18, 27, 22.5, 20.25]),
        (100.0, [8, 12, 18, 27, 40.5, 60.75]),
        (5.0, [8, 4, 6, 5, 5.5, 5.25]),
    ],
)
def test_the_search_grows_until_a_rate_fails_and_then_bisects(most, rates):
    rows = search(lambda rate: {"rate_per_s": rate, "good": rate <= most}, 8.0, 6)
    assert [row["rate_per_s"] for row in rows] == rates
