"""The benchmark of image checks, on a tiny engine."""

from engine.benchmarks import image_checks
from engine.benchmarks.offline import Work
from lorikeet_engine.residency import image_checks as residency_checks
from tests.engine.tiny_engine import tiny_engine


def test_what_checks_cost_is_told_and_the_engine_is_left_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(image_checks, "STEPS", 64)
    for module in (image_checks, residency_checks):
        monkeypatch.setattr(module, "EVERY_STEPS", 32)
    engine = tiny_engine(tmp_path, adapters=2, room=2)
    checks = engine._tiers._checks
    (row,) = image_checks.measure_all(engine, [Work("2 adapters", 9, 100, 2, requests=4)])
    assert row.step_ms > 0
    assert row.thread_us > 0
    assert row.gpu_us > 0
    assert abs(row.share - (row.thread_us + row.gpu_us) / (1e3 * row.step_ms)) < 1e-9
    assert checks.step.__func__ is type(checks).step, "the timer is gone"
    assert engine.status().live.running == 0
    engine.close()
