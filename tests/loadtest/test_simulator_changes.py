"""What is measured of a fleet when replicas come and go."""

from dataclasses import replace

import pytest

from loadtest.simulator import changes
from loadtest.simulator.changes import DIES, FLEETS, JOINS, RESHUFFLED, columns, rows, timeline


@pytest.mark.parametrize("event", [JOINS, DIES, RESHUFFLED])
@pytest.mark.parametrize("placement", [False, True])
def test_each_change_is_measured_before_and_after(monkeypatch, event, placement):
    small = replace(next(iter(FLEETS.values())), adapters=100, replicas=3, load=0.3, gpu_room=0.2)
    monkeypatch.setattr(changes, "SEEDS", (1,))
    monkeypatch.setattr(changes, "AT_S", 130.0)
    monkeypatch.setitem(FLEETS, "small", replace(small, duration_s=250.0))
    found = timeline(("small", event, placement))
    before, after = found.hits[0], found.hits[-1]
    assert 0.3 < before < 1.0
    assert (after > before) if event == JOINS else (found.hits[1] < before)
    assert (found.joined is not None) == (event == JOINS)
    assert all(0.0 < value < 10.0 for value in found.ttft_p99_s)
    assert all(value > 0.0 for value in found.loads_per_s)
    assert all(len(row) == len(columns()) for row in rows(found))
