from dataclasses import replace

import pytest

from loadtest.engine import border
from lorikeet_engine.device import border_memory
from lorikeet_engine.execution import border as moving_border
from tests.engine.tiny_engine import SETTINGS, tiny_engine

MANY = border.Traffic("many", adapters=12, prompt_tokens=8, output_tokens=2)
LONG = border.Traffic("long", 2, 8, 2, prefixes=6, prefix_tokens=96)


@pytest.mark.parametrize("moving", [False, True])
def test_each_phase_has_a_row_of_its_own_traffic(moving, tmp_path, monkeypatch):
    monkeypatch.setattr(border, "IN_FLIGHT", 4)
    monkeypatch.setattr(moving_border, "EVERY_S", 0.05)
    monkeypatch.setitem(border_memory.GRANULES, "cpu", 4096)
    more = {"kv_bytes": 4 << 20, "max_context": 160, "max_batch_adapters": 4}
    settings = replace(SETTINGS, moving_border=moving, **more)
    engine = tiny_engine(tmp_path, settings=settings, adapters=14, room=4)
    rows = list(border.phases(engine, "here", (MANY, LONG), 0.4))
    assert [row.traffic for row in rows] == ["many", "long"]
    assert all(row.good_per_s > 0 for row in rows)
    assert (rows[0].moves > 0) is moving
    engine.close()
