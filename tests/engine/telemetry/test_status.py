"""Status of an engine: its work, the tiers of adapters, and reports of changes only."""

import time
from dataclasses import replace

import pytest

from lorikeet_engine.adapter import Residency
from lorikeet_engine.costs import seen_tokens
from lorikeet_engine.request import SchedulingParams
from lorikeet_engine.telemetry.status import LiveStats
from tests.engine.engine_driver import Answers, build, greedy, prompt
from tests.engine.peft_adapters import save_adapter
from tests.waiting import eventually


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


def arena_bytes(engine):
    return engine.status().tiers[Residency.GPU].capacity_bytes


def test_live_stats_of_an_idle_engine_are_zero(engine):
    live, arena = engine.status().live, arena_bytes(engine)
    pages = live.kv_pages_total
    assert live == LiveStats(kv_pages_total=pages, free_bytes=arena, room_bytes=arena)


def test_live_stats_count_waiting_and_decoding_sequences(engine, refs):
    answers = Answers(engine)
    for ref in refs:  # both adapters are loaded first, so that all decode at the same time
        answers.submit(greedy(f"first {ref.name}", prompt(1), adapter=ref, max_tokens=1))
    answers.all()
    answers.tokens.clear()
    answers.submit(greedy("a", prompt(20), prompt(3), n=2, adapter=refs[0]))
    answers.submit(greedy("b", prompt(30), adapter=refs[1]))
    answers.submit(greedy("base", prompt(7)))
    live = engine.status().live
    assert (live.running, live.waiting, live.pending_tokens) == (0, 6, 2 * 23 + 30 + 7)
    assert live.pending_seen == 2 * (seen_tokens(20) + seen_tokens(3)) + 450 + seen_tokens(7)
    answers.until(lambda: engine.status().live.decoding == 6)
    live = engine.status().live
    made = sum(map(len, answers.tokens.values()))
    assert live.context == 2 * 23 + 30 + 7 + made
    assert (live.running, live.pending, live.pending_tokens, live.oldest_wait_s) == (6, 0, 0, 0.0)
    assert live.ranks == 4 + 8
    assert live.kv_pages_used > 0
    answers.all()
    live = engine.status().live
    assert live.running == live.decoding == live.ranks == live.kv_pages_used == 0


def test_live_stats_count_sequences_in_the_background_apart(engine):
    answers = Answers(engine)
    answers.submit(
        replace(greedy("line", prompt(20)), scheduling=SchedulingParams(background=True))
    )
    waiting = engine.status().live
    assert (waiting.waiting, waiting.background, waiting.oldest_wait_s) == (1, 1, 0.0)
    answers.until(lambda: engine.status().live.decoding == 1)
    live = engine.status().live
    assert (live.background, live.background_pages) == (1, live.kv_pages_used)
    answers.submit(greedy("request", prompt(20)))
    live = engine.status().live
    assert (live.waiting, live.background, live.oldest_wait_s > 0) == (1, 1, True)
    answers.all()


def test_context_counts_less_where_layers_have_windows(tiny_checkpoints, shelf, tmp_path):
    engine = build(tiny_checkpoints["gemma3_text"], shelf, tmp_path / "cache", overlap=False)
    costs = engine.info.step_costs
    answers = Answers(engine)
    answers.submit(greedy("long", prompt(60)))
    answers.until(lambda: engine.status().live.decoding == 1)
    length = 60 + sum(map(len, answers.tokens.values()))
    context = engine.status().live.context
    engine.close()
    assert 0 < costs.windowed < 1
    assert costs.window < 60
    assert context == round(costs.window * costs.windowed + length * (1 - costs.windowed))


def test_a_half_computed_prompt_is_running_and_pending(tiny_checkpoints, shelf, tmp_path):
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
    live = engine.status().live
    assert (live.running, live.decoding, live.prefilling, live.waiting) == (1, 0, 1, 0)
    assert (live.pending, live.pending_tokens) == (1, 24)
    assert live.oldest_wait_s > 0
    engine.close()


def test_live_stats_have_loading_bytes_and_the_oldest_wait(engine, shelf, refs):
    answers = Answers(engine)
    answers.submit(greedy("a", prompt(5), adapter=refs[0]))
    answers.all()
    size = engine.adapters()[0].image_bytes
    shelf.hold(refs[1])
    answers.submit(greedy("b", prompt(5), adapter=refs[1]))
    answers.step()
    time.sleep(0.05)
    live = engine.status().live
    assert live.oldest_wait_s > 0.05
    assert live.loading_bytes == size  # of an image of unknown size, taken to be as large as others
    shelf.release(refs[1])
    answers.all()
    assert engine.status().live.loading_bytes == 0


def test_live_stats_name_the_first_adapter_to_evict(engine, refs):
    answers = Answers(engine)
    for name, ref in (("a", refs[0]), ("b", refs[1]), ("c", refs[1])):
        answers.submit(greedy(name, prompt(5), adapter=ref))
        answers.all()
    live, found = engine.status().live, {each.name: each for each in engine.adapters()}
    assert live.victim == (found["r4"].image_bytes, 1.0)
    assert found["r4"].image_bytes == found["r8"].image_bytes / 2
    assert found["r4"].uses == pytest.approx(1.0, rel=0.1)
    assert found["r8"].uses == pytest.approx(2.0, rel=0.1)
    assert live.free_bytes == arena_bytes(engine) - sum(each.gpu_bytes for each in found.values())
    assert live.room_bytes == arena_bytes(engine)
    engine.submit(greedy("d", prompt(5), adapter=refs[0]))
    engine.step()
    busy = engine.status().live
    assert busy.victim.image_bytes == found["r8"].image_bytes
    assert busy.room_bytes == live.room_bytes - found["r4"].image_bytes


def test_without_a_resident_adapter_there_is_no_victim(engine):
    assert engine.status().live.victim is None


def test_adapters_are_listed_down_to_a_tier(engine, refs):
    answers = Answers(engine)
    answers.submit(greedy("a", prompt(5), adapter=refs[0]))
    answers.all()
    engine.prefetch(refs[1], Residency.DISK)
    answers.until(lambda: engine.residency(refs[1]) is Residency.DISK)
    assert [each.ref for each in engine.adapters(Residency.GPU)] == [refs[0]]
    found = {each.ref: each for each in engine.adapters()}
    assert found.keys() == set(refs)
    there, elsewhere = found[refs[0]], found[refs[1]]
    assert (there.rank, there.gpu_bytes) == (4, there.image_bytes)
    assert (elsewhere.rank, elsewhere.gpu_bytes, elsewhere.image_bytes) == (None, 0, None)


def test_a_report_has_the_status_and_the_tiers_changed_since_the_last_one(engine, refs, tmp_path):
    answers = Answers(engine)
    assert engine.report() == engine.report() == engine.status()
    answers.submit(greedy("a", prompt(5), adapter=refs[0]))
    assert engine.report().live.waiting == 1
    answers.all()
    status = engine.report()
    assert status.moved == {refs[0].digest: Residency.GPU}
    assert status.live == engine.status().live
    assert status.costs.loads.disk_latency_s > 0
    assert status.costs.steps == engine.info.step_costs
    engine.step()
    blob_bytes = (tmp_path / "cache" / refs[0].digest).stat().st_size
    # meanwhile its image is written to the disk
    disk = Residency.DISK
    assert eventually(lambda: engine.status().tiers[disk].used_bytes > blob_bytes, within_s=20)
    told = engine.report()
    assert (told.live, told.moved) == (status.live, {})
