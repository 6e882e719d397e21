"""What an engine says of itself: its load, where its adapters are, and only what has changed."""

import time

import pytest

from lorikeet_engine.adapter import Residency
from lorikeet_engine.news import EngineLoad
from tests.engine.driving import Answers, build, greedy, prompt
from tests.engine.peft_adapters import BlobShelf, save_adapter


@pytest.fixture
def shelf(tmp_path):
    return BlobShelf(tmp_path / "blobs")


@pytest.fixture
def refs(tiny_checkpoints, shelf, tmp_path):
    """Adapters of ranks 4 and 8."""
    folders = [
        save_adapter(tiny_checkpoints["llama"], tmp_path / f"r{r}", r=r, target_modules=["q_proj"])
        for r in (4, 8)
    ]
    return [shelf.add(folder, folder.name) for folder in folders]


@pytest.fixture
def engine(tiny_checkpoints, shelf, tmp_path):
    engine = build(tiny_checkpoints["llama"], shelf, tmp_path / "cache", overlap=False)
    yield engine
    engine.close()


def test_an_idle_engine_has_nothing_to_do(engine):
    arena = engine.report().arena_bytes_total
    assert engine.load() == EngineLoad(free_bytes=arena, room_bytes=arena)


def test_the_load_is_what_waits_and_what_decodes(engine, refs):
    answers = Answers(engine)
    answers.submit(greedy("a", prompt(20), prompt(3), n=2, adapter=refs[0]))
    answers.submit(greedy("b", prompt(30), adapter=refs[1]))
    answers.submit(greedy("base", prompt(7)))
    load = engine.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (0, 6, 2 * 23 + 30 + 7)
    answers.until(lambda: engine.load().running == 6)
    load = engine.load()
    assert (load.waiting, load.waiting_tokens, load.oldest_wait_s) == (0, 0, 0.0)
    assert load.ranks == 4 + 8
    report = engine.report()
    assert load.kv_used == report.kv_pages_used / report.kv_pages_total > 0
    answers.all()
    assert engine.load().running == engine.load().ranks == engine.load().kv_used == 0


def test_a_prompt_that_is_half_computed_still_waits(tiny_checkpoints, shelf, tmp_path):
    engine = build(
        tiny_checkpoints["llama"],
        shelf,
        tmp_path / "cache",
        max_batch_tokens=16,
        max_running=4,
        overlap=False,
    )
    answers = Answers(engine)
    answers.submit(greedy("long", prompt(40)))
    answers.step()
    load = engine.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (0, 1, 24)
    assert load.oldest_wait_s > 0
    engine.close()


def test_a_load_under_way_is_told_with_how_long_it_keeps_somebody_waiting(engine, shelf, refs):
    answers = Answers(engine)
    answers.submit(greedy("a", prompt(5), adapter=refs[0]))
    answers.all()
    size = engine.report().adapters[0].image_bytes
    shelf.hold(refs[1])
    answers.submit(greedy("b", prompt(5), adapter=refs[1]))
    answers.step()
    time.sleep(0.05)
    load = engine.load()
    assert load.oldest_wait_s > 0.05
    assert load.loading_bytes == size  # of an image that was never seen: as large as others
    shelf.release(refs[1])
    answers.all()
    assert engine.load().loading_bytes == 0


def test_what_would_be_evicted_first_is_told(engine, refs):
    answers = Answers(engine)
    for name, ref in (("a", refs[0]), ("b", refs[1]), ("c", refs[1])):
        answers.submit(greedy(name, prompt(5), adapter=ref))
        answers.all()
    load, reports = engine.load(), {r.ref.name: r for r in engine.report().adapters}
    assert load.victim_bytes == reports["r4"].image_bytes == reports["r8"].image_bytes / 2
    assert load.victim_uses == 1.0
    assert reports["r4"].uses == pytest.approx(1.0, rel=0.1)
    assert reports["r8"].uses == pytest.approx(2.0, rel=0.1)
    used = sum(report.gpu_bytes for report in reports.values())
    assert load.free_bytes == engine.report().arena_bytes_total - used
    assert load.room_bytes == engine.report().arena_bytes_total
    engine.submit(greedy("d", prompt(5), adapter=refs[0]))
    engine.step()
    assert engine.load().victim_bytes == reports["r8"].image_bytes
    assert engine.load().room_bytes == load.room_bytes - reports["r4"].image_bytes


def test_only_what_has_changed_is_news(engine, refs):
    answers = Answers(engine)
    assert engine.news().moved == {}
    assert engine.news() is None
    answers.submit(greedy("a", prompt(5), adapter=refs[0]))
    assert engine.news().load.waiting == 1
    answers.all()
    news = engine.news()
    assert news.moved == {refs[0].digest: Residency.GPU}
    assert news.load == engine.load()
    assert news.loads.disk_latency_s > 0
    engine.step()
    time.sleep(0.05)  # its image is written to the disk meanwhile
    assert engine.news() is None
