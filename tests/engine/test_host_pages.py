"""KV pages on the host: answers stay the same, and no page crosses tenants, adapters or versions.

The tokens of hash_model depend on everything that it reads from the KV pages, so a page of other
tokens or of another adapter becomes a wrong token.
"""

import logging
import os
import shutil
import threading
from collections import Counter, deque
from contextlib import nullcontext
from itertools import product
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet_engine.errors import DeviceLost, SettingsError, StepFailed
from lorikeet_engine.execution import batch_builder, page_copies, page_file, steps
from lorikeet_engine.execution.page_copies import (
    CudaRankPages,
    PageCopies,
    RankMemory,
    RankPages,
    page_words,
)
from lorikeet_engine.execution.page_file import PageFile
from lorikeet_engine.parallel.followers import RankCopies
from lorikeet_engine.request import SamplingParams
from lorikeet_engine.scheduling import host_pages
from lorikeet_engine.scheduling.host_pages import Arrival, DiskCopy, Fetch, HostPages, PageCopy
from lorikeet_engine.scheduling.kv_cache import KVCache
from tests.engine.blobs import Shelf
from tests.engine.checked_engine import GOOD, OTHER, CheckedEngine
from tests.engine.engine_driver import Answers, build, greedy, nothing_is_held, prompt
from tests.engine.hash_model import PAGE, WHOLE, WINDOWED
from tests.engine.process_engines import followers

pytestmark = pytest.mark.usefixtures("one_thread")

SLOT_BYTES = 2 * 4 * 4 * PAGE + 8
PLACE_BYTES = 4096
LONG = tuple(range(3, 35))  # 8 pages
ONE, SHORT = SamplingParams(1, temperature=0.0), SamplingParams(2, temperature=0.0)


@pytest.fixture
def always_fetch(monkeypatch):
    monkeypatch.setattr(HostPages, "pays", lambda *_: True)


@pytest.fixture
def long_fetches(monkeypatch):
    """Have no step wait for pages, as for those of a long prefix."""
    monkeypatch.setattr(host_pages, "IN_STEP_S", -1.0)


@pytest.fixture
def small_pieces(monkeypatch):
    """Save states behind each page, as kernels with chunks of a page would."""
    monkeypatch.setattr(KVCache, "state_piece", PAGE)
    monkeypatch.setattr(batch_builder, "CHUNK", PAGE)


def checked(folder, *, host_pages=40, kv_pages=12, disk_pages=0, **more):
    return CheckedEngine(
        folder,
        kv_pages=kv_pages,
        kv_host_bytes=host_pages * SLOT_BYTES,
        kv_disk_bytes=disk_pages * PLACE_BYTES,
        **{"max_running": 3, "max_batch_tokens": 20, **more},
    )


def usage(engine):
    return engine.status().host_pages


def answer(engine, tokens=LONG, adapter=None, salt=""):
    """Let an engine answer one request; return the tokens that it computed."""
    before = engine.model.tokens
    engine.submit(tokens, sampling=SHORT, adapter=adapter, salt=salt)
    engine.drain_requests()
    return engine.model.tokens - before


def push_out(engine):
    """Fill the KV pages with other prompts."""
    for first in (40, 41, 42):
        answer(engine, (first, *LONG[1:]))


def test_a_prefix_comes_back_from_the_host_instead_of_being_computed(tmp_path, always_fetch):
    engine = checked(tmp_path)
    computed = answer(engine)
    push_out(engine)
    assert usage(engine.engine).fetched == 0
    assert answer(engine) <= computed - len(LONG) + PAGE
    found = usage(engine.engine)
    assert found.fetched == len(LONG) // PAGE - 1
    assert found.tokens == len(LONG) - PAGE
    assert engine.engine.status().cached_tokens >= found.tokens
    push_out(engine)
    before = usage(engine.engine)
    answer(engine)
    push_out(engine)
    again = usage(engine.engine)
    assert again.fetched == before.fetched + 4 * found.fetched
    assert again.stored - before.stored <= 3, "pages that the host has are not copied again"


def damage_file(engine, place):
    """Change a byte of a page in the file on the disk."""
    pages_file = engine.engine._page_copies._own.file
    fd, at = pages_file._file.fileno(), place * pages_file._stride + 40
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)


def to_disk(engine, first=50):
    """Answer other prompts until the first ones have left host memory for the disk."""
    for which in range(first, first + 8):
        answer(engine, (which, *LONG[1:]))
        for _ in range(10):
            engine.fetch()
            engine.step()


def test_a_prefix_comes_back_from_the_disk(tmp_path, always_fetch):
    engine = checked(tmp_path, host_pages=24, disk_pages=200)
    computed = answer(engine)
    to_disk(engine)
    before = usage(engine.engine)
    assert before.evicted > 0
    assert before.read == 0
    assert answer(engine) <= computed - len(LONG) + PAGE
    found = usage(engine.engine)
    assert found.read == len(LONG) // PAGE - 1
    assert found.tokens - before.tokens == len(LONG) - PAGE
    assert found.written >= found.on_disk > found.pages
    to_disk(engine, 40)
    assert answer(engine) <= computed - len(LONG) + PAGE, "the pages stayed on the disk"


def test_a_page_is_written_to_a_small_disk_once(tmp_path):
    engine = checked(tmp_path, host_pages=40, disk_pages=4)
    for which in range(50, 56):
        answer(engine, (which, *LONG[1:]))
    for _ in range(200):
        engine.fetch()
        engine.step()
    assert usage(engine.engine).written <= usage(engine.engine).stored
    assert not engine.fetches.work, "nothing is left to write"


@pytest.mark.parametrize(
    "damage", ["a byte", "a page of another prompt", "an error", "cut off", "cut in a page"]
)
def test_pages_damaged_on_the_disk_are_computed_again(damage, tmp_path, always_fetch, monkeypatch):
    engine = checked(tmp_path, host_pages=24, disk_pages=200)
    computed = answer(engine)
    to_disk(engine)
    disk, pages_file = engine.engine._cache.host.disk, engine.engine._page_copies._own.file
    fd, stride = pages_file._file.fileno(), pages_file._stride
    if damage == "a byte":
        for place in range(disk.slots):
            damage_file(engine, place)
    elif damage == "an error":
        pages_file._file.close()
    elif damage.startswith("cut"):
        os.ftruncate(fd, 100 if damage == "cut in a page" else 0)
    else:
        os.pwrite(fd, os.pread(fd, stride * 190, 0), stride)
    assert answer(engine) == computed
    found = usage(engine.engine)
    assert (found.read, found.damaged) == (0, len(LONG) // PAGE - 1)


def test_a_disk_that_fails_is_given_up(tmp_path, always_fetch, caplog):
    engine = checked(tmp_path, host_pages=24, disk_pages=200)
    engine.engine._page_copies._own.file._file.close()
    answer(engine)
    to_disk(engine)
    assert [r.msg for r in caplog.records].count("kv_disk_given_up") == 1
    assert usage(engine.engine).on_disk == 0
    answer(engine)


def test_pages_that_only_the_disk_has_are_computed_if_that_is_faster(tmp_path, monkeypatch):
    monkeypatch.setattr(HostPages, "pays", lambda *asked: not asked[-1])
    engine = checked(tmp_path, host_pages=24, disk_pages=200)
    computed = answer(engine)
    to_disk(engine)
    assert answer(engine) == computed
    assert usage(engine.engine).read == 0


def test_a_full_disk_serves_as_without_the_setting(tmp_path, monkeypatch, caplog):
    allocate = page_file._allocate
    monkeypatch.setattr(page_file, "_allocate", lambda fd, _: allocate(fd, 1 << 62))
    with caplog.at_level(logging.WARNING):
        engine = checked(tmp_path, disk_pages=100)
    (refused,) = caplog.records
    assert refused.msg == "kv_pages_not_on_disk"
    assert "large" in refused.error or "space" in refused.error
    assert usage(engine.engine).disk_pages == 0
    answer(engine)


def test_the_file_of_pages_has_no_name(tmp_path, always_fetch):
    engine = checked(tmp_path, host_pages=24, disk_pages=200)
    fd = engine.engine._page_copies._own.file._file.fileno()
    assert os.fstat(fd).st_size >= 200 * PLACE_BYTES
    assert os.fstat(fd).st_nlink == 0


def test_pages_on_the_disk_outlive_a_cleaned_folder_but_not_their_engine(tmp_path, always_fetch):
    engine = checked(tmp_path, host_pages=24, disk_pages=200)
    computed = answer(engine)
    to_disk(engine)
    shutil.rmtree(tmp_path / "cache")
    assert answer(engine) <= computed - len(LONG) + PAGE
    assert usage(engine.engine).read == len(LONG) // PAGE - 1
    again = checked(tmp_path, host_pages=24, disk_pages=200)
    assert answer(again) == computed
    to_disk(again)
    assert answer(again) <= computed - len(LONG) + PAGE
    for each in (engine, again):
        each.engine.close()


@pytest.mark.parametrize(
    "other", [{"salt": "globex"}, {"adapter": GOOD}, {"tokens": (9, *LONG[1:])}]
)
def test_pages_are_of_one_tenant_one_adapter_and_one_beginning(other, tmp_path, always_fetch):
    engine = checked(tmp_path)
    answer(engine)
    push_out(engine)
    answer(engine, **other)
    assert usage(engine.engine).fetched == 0


def test_a_new_version_never_gets_pages_of_the_old_one(tmp_path, always_fetch):
    engine = checked(tmp_path)
    answer(engine, adapter=GOOD)
    push_out(engine)
    engine.refs[GOOD] = engine.refs[OTHER]  # the same name now stands for another digest
    answer(engine, adapter=GOOD)
    assert usage(engine.engine).fetched == 0


def test_pages_that_are_computed_faster_are_not_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(HostPages, "pays", lambda *_: False)
    engine = checked(tmp_path)
    answer(engine)
    push_out(engine)
    answer(engine)
    assert usage(engine.engine).fetched == 0
    assert usage(engine.engine).stored > 0


def test_damaged_pages_are_computed_again(tmp_path, always_fetch):
    engine = checked(tmp_path)
    answer(engine)
    push_out(engine)
    engine.engine._page_copies._own._host[:, 3] ^= 1
    answer(engine)
    found = usage(engine.engine)
    assert found.fetched == 0
    assert found.damaged == len(LONG) // PAGE - 1


def test_requests_that_are_aborted_while_their_pages_come_leave_no_page_behind(
    tmp_path, always_fetch, long_fetches
):
    engine = checked(tmp_path)
    answer(engine)
    push_out(engine)
    name = engine.submit(LONG, sampling=SHORT)
    engine.step()
    assert engine.fetches.work, "no fetch is under way"
    engine.abort(name)
    engine.step()
    assert engine.engine.status().live.kv_pages_used == len(LONG) // PAGE - 1
    engine.drain()
    assert usage(engine.engine).fetched == len(LONG) // PAGE - 1


def test_other_requests_run_while_pages_come(tmp_path, always_fetch, long_fetches):
    engine = checked(tmp_path, kv_pages=24)
    answer(engine)
    push_out(engine)
    push_out(engine)
    engine.submit(LONG, sampling=SHORT)
    engine.step()
    other = engine.submit(LONG[:5], sampling=SHORT, salt="globex")
    for _ in range(9):
        engine.step()
    assert other not in engine.live
    assert len(engine.live) == 1
    engine.drain()


def steps_to_first_token(engine, tokens=LONG):
    """Submit a request; return the number of steps until its first token comes."""
    name = engine.submit(tokens, sampling=SHORT)
    for count in range(1, 100):
        engine.step()
        if engine.outputs[name, 0]:
            engine.drain_requests()
            return count
    raise AssertionError("no token")


@pytest.mark.parametrize("windows", [WHOLE, WINDOWED])
def test_a_lone_prefix_on_the_host_takes_as_many_steps_as_one_on_the_gpu(
    windows, tmp_path, always_fetch
):
    engine = checked(tmp_path, kv_pages=24, host_pages=80, windows=windows)
    answer(engine)
    on_gpu = steps_to_first_token(engine)
    push_out(engine)
    push_out(engine)
    assert steps_to_first_token(engine) == on_gpu
    assert usage(engine.engine).fetched > 0
    assert not engine.fetches.work, "no thread was needed"


def test_a_step_is_laid_out_while_its_pages_come_and_launched_when_they_are_there(
    tmp_path, always_fetch, monkeypatch
):
    engine, events = checked(tmp_path), []
    answer(engine)
    push_out(engine)
    begin, lay_out = RankPages.begin, steps.build_step_input

    def begin_and_note(pages, copies):
        events.append("pages begin to come")
        end = begin(pages, copies)

        def note_end():
            events.append("pages are there")
            return end()

        return note_end

    def lay_out_and_note(*batch):
        events.append("laid out")
        return lay_out(*batch)

    monkeypatch.setattr(RankPages, "begin", begin_and_note)
    monkeypatch.setattr(steps, "build_step_input", lay_out_and_note)
    check = engine.model.before
    engine.model.before = lambda batch: (events.append("launched"), check(batch))
    answer(engine)
    assert events[:4] == ["pages begin to come", "laid out", "pages are there", "launched"]
    assert events.count("pages are there") == 1


def test_no_step_of_others_waits_for_pages(tmp_path, always_fetch):
    engine = checked(tmp_path, kv_pages=24, host_pages=80)
    answer(engine)
    push_out(engine)
    push_out(engine)
    stream = engine.submit(LONG[:5], sampling=SamplingParams(20, temperature=0.0), salt="globex")
    engine.step()
    engine.step()
    engine.submit(LONG, sampling=SHORT)
    got = len(engine.outputs[stream, 0])
    engine.step()
    engine.step()
    assert engine.fetches.work, "a thread brings the pages"
    assert len(engine.outputs[stream, 0]) == got + 2
    engine.drain()


def test_a_step_waits_for_no_fetch_beside_another(tmp_path, always_fetch, monkeypatch):
    """Two fetches at once would share the buffers of their copies."""
    engine = checked(tmp_path, kv_pages=24, host_pages=80)
    answer(engine)
    push_out(engine)
    push_out(engine)
    with monkeypatch.context() as patch:
        patch.setattr(host_pages, "IN_STEP_S", -1.0)
        aborted = engine.submit(LONG, sampling=SHORT)
        engine.step()
        engine.abort(aborted)
        engine.step()
    engine.submit((40, *LONG[1:]), sampling=SHORT)
    engine.step()
    assert len(engine.fetches.work) == 2
    engine.drain()


@pytest.mark.parametrize("fault", ["no memory for the copy", "the batch cannot be laid out"])
def test_a_fault_while_a_step_waits_for_pages_leaves_nothing_behind(
    fault, tmp_path, always_fetch, monkeypatch
):
    engine = checked(tmp_path)
    computed = answer(engine)
    push_out(engine)

    def fail(*_):
        monkeypatch.undo()
        monkeypatch.setattr(HostPages, "pays", lambda *_: True)
        raise torch.OutOfMemoryError("a test")

    if fault == "no memory for the copy":
        monkeypatch.setattr(RankPages, "begin", fail)
        assert answer(engine) == computed
        assert usage(engine.engine).damaged == len(LONG) // PAGE - 1
    else:
        monkeypatch.setattr(steps, "build_step_input", fail)
        name = engine.submit(LONG, sampling=SHORT)
        (failed,) = (each for _ in range(3) for each in engine.engine.step())
        assert isinstance(failed.error, StepFailed)
        del engine.live[name]
    engine.drain()


def test_no_score_of_a_prompt_is_lost_with_damaged_pages(tmp_path, always_fetch):
    engine = checked(tmp_path)
    answer(engine)
    push_out(engine)
    engine.engine._page_copies._own._host[:, 0] ^= 1
    scored = SamplingParams(2, temperature=0.0, prompt_logprobs=0)
    name = engine.submit(LONG, sampling=scored)
    (sequence,) = engine.engine._requests.submitted
    sequence.kv.score_from = engine.scored[name, 0] = 5 * PAGE  # before it was preempted
    engine.drain()
    assert usage(engine.engine).damaged == 5
    assert engine.scored[name, 0] == len(LONG) - 1


def test_requests_with_one_prefix_share_its_fetch(tmp_path, always_fetch):
    engine = checked(tmp_path)
    answer(engine)
    push_out(engine)
    for _ in range(3):
        engine.submit(LONG, sampling=SHORT)
    engine.drain()
    assert usage(engine.engine).fetched == len(LONG) // PAGE - 1


def test_tokens_that_come_by_two_fetches_count_as_from_the_host(
    tmp_path, always_fetch, long_fetches
):
    engine = checked(tmp_path)
    answer(engine)
    push_out(engine)
    engine.submit(LONG[: 4 * PAGE + 1], sampling=SHORT)
    engine.step()
    engine.submit(LONG, sampling=SHORT)  # waits for these pages, then fetches the others
    engine.step()
    engine.drain()
    assert usage(engine.engine).fetched == len(LONG) // PAGE - 1
    assert usage(engine.engine).tokens == 4 * PAGE + len(LONG) - PAGE


def test_pages_of_a_damaged_adapter_that_are_under_way_are_not_shared(
    tmp_path, always_fetch, long_fetches
):
    engine = checked(tmp_path)
    answer(engine, adapter=GOOD)
    push_out(engine)
    engine.submit(LONG, sampling=SHORT, adapter=GOOD)
    engine.step()
    assert engine.fetches.work
    digest = engine.refs[GOOD].digest
    engine.engine._cache.forget_adapter(digest)
    engine.drain()
    assert usage(engine.engine).tokens == 0


def test_failing_all_requests_forgets_all_pages(tmp_path, always_fetch):
    engine = checked(tmp_path)
    answer(engine)
    push_out(engine)
    engine.submit(LONG, sampling=SHORT)
    engine.step()
    engine.fetch()
    engine.engine.fail_all(SettingsError("a test"))
    engine.live.clear()
    assert usage(engine.engine).used == 0
    answer(engine)


@pytest.mark.parametrize("in_step_s", [-1.0, 1.0])
def test_an_engine_whose_copies_hang_ends_rather_than_let_them_overwrite_pages(
    in_step_s, tmp_path, always_fetch, monkeypatch
):
    engine = checked(tmp_path)
    answer(engine)
    push_out(engine)
    monkeypatch.setattr(host_pages, "IN_STEP_S", in_step_s)
    engine.submit(LONG, sampling=SHORT)
    if in_step_s > 0:  # a step that waits for pages fails before
        monkeypatch.setattr(steps, "build_step_input", lambda *_: 1 / 0)
        engine.engine.step()
    else:
        engine.step()
    monkeypatch.setattr(page_copies, "_ABANDON_S", 0.01)
    assert engine.engine._page_copies._under_way, "no fetch is under way"
    with pytest.raises(DeviceLost, match="copies of KV pages"):
        engine.engine.fail_all(SettingsError("a test"))


def test_a_host_without_memory_serves_as_without_the_setting(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise SettingsError("the host cannot pin so much memory")

    monkeypatch.setattr(page_copies, "host_memory", refuse)
    with caplog.at_level(logging.WARNING):
        engine = checked(tmp_path)
    assert [record.msg for record in caplog.records] == ["kv_pages_not_on_host"]
    assert usage(engine.engine) is None
    assert answer(engine) == answer(engine, (9, *LONG[1:]))


def test_a_prefix_comes_back_with_its_state(tmp_path, always_fetch, small_pieces):
    engine = checked(tmp_path, states=True, cached_states=2)
    computed = answer(engine)
    push_out(engine)
    assert answer(engine) <= computed - len(LONG) + PAGE
    found = usage(engine.engine)
    assert found.fetched == len(LONG) // PAGE - 1
    assert found.tokens == len(LONG) - PAGE


def test_a_damaged_state_is_computed_again(tmp_path, always_fetch, small_pieces):
    engine = checked(tmp_path, states=True, cached_states=2)
    computed = answer(engine)
    push_out(engine)
    engine.engine._page_copies.memory.states._host[:, 0] ^= 1
    assert answer(engine) == computed
    assert usage(engine.engine).fetched == 0


def test_a_preempted_answer_goes_on_from_its_pages_on_the_host(tmp_path, always_fetch):
    def computed(host_pages):
        engine = checked(tmp_path / str(host_pages), host_pages=host_pages)
        for first in (1, 2):
            tokens = (first, *LONG[1:17])
            engine.submit(tokens, sampling=SamplingParams(26, temperature=0.0), salt=str(first))
        engine.drain_requests()
        assert engine.engine.status().preemptions > 0
        return engine.model.tokens, usage(engine.engine)

    again, without = computed(0)
    once, found = computed(40)
    assert without is None
    assert found.fetched > 0
    assert once == again - found.fetched * PAGE


def keep(engine, name, tokens=LONG, **more):
    """Compute a prompt whose pages are kept under a name; let the engine copy them to the host."""
    names = engine.engine.keep_prompts(())
    engine.engine.keep_prompts((*names, name))
    engine.submit(tokens, sampling=ONE, background=True, keeps=name, **more)
    engine.drain_requests()
    for _ in range(len(LONG)):
        engine.step()


@pytest.mark.parametrize("windows", [WHOLE, WINDOWED])
def test_a_kept_prompt_stays_on_the_host_until_it_is_dropped(windows, tmp_path, always_fetch):
    engine = checked(tmp_path, host_pages=40, kv_pages=24, windows=windows)
    computed = answer(engine, LONG[:-1], adapter=GOOD)
    keep(engine, "good", (*LONG[:-1], 1), adapter=GOOD)
    kept = usage(engine.engine).of_prompts
    assert kept >= len(LONG) // PAGE
    for first in range(40, 60):
        answer(engine, (first, *LONG[1:]))
    assert usage(engine.engine).evicted > 0
    assert usage(engine.engine).of_prompts == kept
    assert answer(engine, (*LONG[:-1], 2), adapter=GOOD) <= computed - len(LONG) + 2 * PAGE
    assert engine.engine.keep_prompts(()) == ("good",)
    engine.step()
    assert engine.engine.keep_prompts(()) == ()
    assert usage(engine.engine).of_prompts == 0


@pytest.mark.parametrize("damaged", ["pages", "state", "adapter"])
def test_a_kept_prompt_that_has_lost_a_page_is_to_be_computed_again(
    damaged, tmp_path, always_fetch, small_pieces
):
    states = {"states": True, "cached_states": 2} if damaged == "state" else {}
    engine = checked(tmp_path, host_pages=80, kv_pages=24, **states)
    keep(engine, "good", adapter=GOOD)
    names = engine.engine.keep_prompts(("good",))
    assert names == ("good",)
    if damaged == "adapter":
        engine.engine._cache.forget_adapter(engine.refs[GOOD].digest)
    else:
        memory = engine.engine._page_copies
        (memory._own if damaged == "pages" else memory.memory.states)._host[:, 0] ^= 1
        for first in range(40, 50):
            answer(engine, (first, *LONG[1:]))
        answer(engine, adapter=GOOD)
    assert engine.engine.keep_prompts(names) == ()
    keep(engine, "good", adapter=GOOD)
    assert engine.engine.keep_prompts(names) == names


def test_kept_prompts_take_half_of_the_host_and_tenants_share_it(tmp_path):
    engine = checked(tmp_path, host_pages=40)
    for which in range(3):
        keep(engine, f"acme-{which}", (which, *LONG[1:]), salt="acme")
    assert usage(engine.engine).of_prompts == 16, "two prompts of eight pages fill the half"
    keep(engine, "globex", salt="globex")
    host = engine.engine._cache.host
    assert {name: len(pages) for name, pages in host.kept.items() if pages} == {
        "acme-0": 8,
        "globex": 8,
    }
    keep(engine, "globex-2", (9, *LONG[1:]), salt="globex")
    assert not host.kept["globex-2"], "globex would have more than acme"
    engine.engine.keep_prompts(["globex"])
    engine.step()
    assert list(host.kept) == ["globex"]
    assert usage(engine.engine).of_prompts == 8


def test_a_prompt_whose_state_has_no_room_takes_no_pages(tmp_path, small_pieces):
    engine = checked(tmp_path, host_pages=2 * 40, states=True, cached_states=2)
    states = engine.engine._cache.host_states
    states.slots = 2  # one of them for kept prompts
    states._free = deque(range(2))
    keep(engine, "one", salt="acme")
    kept = usage(engine.engine).of_prompts
    assert kept == len(LONG) // PAGE - 1
    keep(engine, "two", (9, *LONG[1:]), salt="acme")
    assert engine.engine.keep_prompts(()) == ("one", "two")
    assert usage(engine.engine).of_prompts == kept


COUNTED = Counter()


CHURNS = given(
    seed=st.integers(0, 2**32),
    host_pages=st.sampled_from((60, 30, 12, 1)),
    room=st.sampled_from((40, 3)),
    windows=st.sampled_from((WHOLE, WINDOWED)),
    overlap=st.booleans(),
    states=st.sampled_from((False, False, True)),
    disk_pages=st.sampled_from((0, 200, 20)),
)


def churn(folder, seed, host_pages, room, windows, overlap, states, disk_pages):
    """Answer random requests while pages come and go, some damaged."""
    chance = Random(seed)
    engine = checked(
        folder / str(chance.random()),
        host_pages=host_pages << states,  # half of the memory is for states
        disk_pages=disk_pages << states,
        kv_pages=chance.randrange(12, 30),
        windows=WHOLE if states else windows,
        overlap=overlap,
        states=states,
        cached_states=2,
        adapter_gpu_bytes=2 * 512,
        max_batch_adapters=2,
    )
    for _ in range(60):
        if len(engine.live) < 6:
            tokens = (chance.choice((7, 8)),) * chance.choice((13, 24, 32)) + (chance.randrange(9),)
            sampling = SamplingParams(chance.choice((1, 9, 30)), seed=3)
            adapter, salt = chance.choice((None, GOOD, OTHER)), chance.choice(("", "globex"))
            keeps = chance.choice(("", "", "a", "b", "c"))
            known = {"adapter": adapter, "salt": salt, "keeps": keeps}
            name = engine.submit(tokens, sampling=sampling, **known)
            if chance.random() < 0.1:
                engine.step()
                engine.abort(name)
        if chance.random() < 0.1:
            engine.engine.keep_prompts(chance.sample("abc", 2))
        if chance.random() < 0.05:
            host = engine.engine._page_copies._own._host
            host[chance.randrange(len(host)), 0] += 1
        if disk_pages and chance.random() < 0.05:
            damage_file(engine, chance.randrange(disk_pages))
        for _ in range(chance.randrange(12)):
            chance.choice((engine.load, engine.fetch, engine.step, engine.step))()
    engine.drain()
    while engine.fetches.work:
        engine.fetch()
    host = engine.engine._cache.host
    assert host.used_by_prompts <= sum(map(len, host.kept.values())) <= host.slots
    COUNTED.update(usage(engine.engine)._asdict(), preempted=engine.engine.status().preemptions)
    if states:
        COUNTED.update(states_fetched=engine.engine._cache.host_states.counts.fetched)
        if disk_pages:
            COUNTED.update(states_on_disk=engine.engine._cache.host_states.disk.used)
    engine.engine.close()


@pytest.mark.parametrize("examples", [3, pytest.param(40, marks=pytest.mark.soak)])
def test_answers_are_the_same_while_pages_come_and_go(
    examples, tmp_path, always_fetch, small_pieces
):
    COUNTED.clear()
    settings(max_examples=examples, deadline=None, derandomize=True)(CHURNS(churn))(tmp_path)
    rare = (
        ("damaged", "preempted", "of_prompts", "states_fetched", "states_on_disk", "read")
        if examples > 3
        else ()
    )
    for event in ("fetched", "evicted", "written", *rare):
        assert COUNTED[event] > 0, COUNTED


FAMILIES = ("llama", "gemma4_text", "glm4_moe_lite", "gpt_oss")
OFTEN = (("llama", "auto"), ("gpt_oss", "fp8"))


def answers_of(engine, rounds=2):
    """Return the answers to prompts that are asked by turns, too many for the KV pages."""
    answers = Answers(engine)
    for turn in range(rounds):
        for which in range(5):
            tokens = [*prompt(70, which), *prompt(3, 10 + which)]
            answers.submit(greedy(f"{which}.{turn}", tokens, max_tokens=8))
            answers.all()
    assert nothing_is_held(engine)
    return answers.tokens


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        pytest.param(*each, marks=[] if each in OFTEN else pytest.mark.soak)
        for each in product(FAMILIES, ("auto", "fp8"))
    ],
)
def test_each_kind_of_page_comes_back_as_it_was(
    family, kv_dtype, tiny_checkpoints, tmp_path, always_fetch
):
    sizes = {"max_context": 96, "max_running": 4, "max_batch_tokens": 32, "kv_dtype": kv_dtype}
    shelf = Shelf(tmp_path / "blobs")
    checkpoint = tiny_checkpoints[family]
    roomy = build(checkpoint, shelf, tmp_path / "a", **sizes)
    expected = answers_of(roomy)
    roomy.close()
    tight = build(checkpoint, shelf, tmp_path / "b", kv_pages=10, kv_host_bytes=4 << 20, **sizes)
    assert answers_of(tight) == expected
    assert usage(tight).fetched >= 20
    tight.close()


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("qwen3_5_text", 1),
        pytest.param("qwen3_5_text", 2, marks=pytest.mark.soak),
        pytest.param("nemotron_h", 1, marks=pytest.mark.soak),
    ],
)
def test_states_of_hybrids_come_back_as_they_were(
    family, ranks, tiny_checkpoints, tmp_path, always_fetch, forked_followers
):
    sizes = {"max_context": 96, "max_running": 2, "max_batch_tokens": 96, "tensor_parallel": ranks}
    shelf = Shelf(tmp_path / "blobs")
    checkpoint = tiny_checkpoints[family]
    roomy = build(checkpoint, shelf, tmp_path / "a", **sizes)
    each = roomy._state_bytes
    expected = answers_of(roomy)
    roomy.close()
    tight = {"kv_pages": 10, "kv_host_bytes": 8 << 20, "state_bytes": 5 * each}
    engine = build(checkpoint, shelf, tmp_path / "b", **tight, **sizes)
    assert answers_of(engine) == expected
    assert engine._cache.host_states.counts.fetched >= 4
    assert usage(engine).tokens >= 4 * 64
    engine.close()


def test_two_processes_each_keep_their_part_of_pages(
    tiny_checkpoints, tmp_path, always_fetch, forked_followers
):
    sizes = {"max_context": 96, "max_running": 4, "max_batch_tokens": 32}
    shelf = Shelf(tmp_path / "blobs")
    roomy = build(tiny_checkpoints["llama"], shelf, tmp_path / "a", **sizes)
    expected = answers_of(roomy)
    host_bytes = 13 * roomy._runner.kv[:, :, :1].nbytes
    roomy.close()
    engine = build(
        tiny_checkpoints["llama"],
        shelf,
        tmp_path / "b",
        kv_pages=10,
        kv_host_bytes=host_bytes,
        kv_disk_bytes=4 << 20,
        tensor_parallel=2,
        **sizes,
    )
    assert answers_of(engine) == expected
    found = usage(engine)
    assert found.fetched >= 8
    assert found.damaged == 0
    assert 2 * found.page_bytes * found.pages <= host_bytes
    assert found.read > 0
    engine.close()
    assert not followers()


def test_a_page_survives_its_way_to_the_host_and_back():
    kv = torch.randn(3, 2, 6, 4, 1, 8).to(torch.float8_e4m3fn)
    pages = RankPages([page_words(kv)], torch.empty(2, 3 * 2 * 4 + 1, dtype=torch.int64))
    before = kv.view(torch.uint8).clone()
    pages.store([(1, 4), (0, 2)])
    kv.view(torch.uint8)[:, :, [1, 2, 3, 4]] = 0
    assert pages.fetch([(1, 3), (0, 1)])() == 0
    assert torch.equal(kv.view(torch.uint8)[:, :, [3, 1]], before[:, :, [4, 2]])


class FakeStream:
    """Stream or event of CUDA that a CPU, which does all at once, need not wait for."""

    def __init__(self, *_, **__):
        self.ends = 0

    def record_event(self):
        return FakeStream()

    def query(self):
        return True

    def nothing(self, *_):
        pass

    wait_event = wait_stream = record = nothing

    def synchronize(self):
        self.ends += 1


@pytest.fixture
def fake_streams(monkeypatch):
    stand_ins = {"Stream": FakeStream, "Event": FakeStream, "stream": lambda _: nullcontext()}
    for name, stand_in in {**stand_ins, "current_stream": lambda _: FakeStream()}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)


def test_copies_in_parts_and_runs_of_slots_move_the_same_pages(fake_streams, monkeypatch):
    monkeypatch.setattr(page_copies, "_AT_ONCE_BYTES", 1)
    kv = torch.randn(3, 2, 40, 4, 2, 8)
    pages = CudaRankPages(
        [page_words(kv)], torch.zeros(40, 3 * 2 * 32 + 1, dtype=torch.int64), 30, 4
    )
    before = kv.clone()
    monkeypatch.setattr(pages, "_run", 3)
    order = [*range(7, 12), 3, 2, *range(20, 33)]
    pages.store([PageCopy(slot, page) for page, slot in enumerate(order)])
    plain = RankPages([page_words(kv)], torch.zeros_like(pages._host))
    plain.store([PageCopy(slot, page) for page, slot in enumerate(order)])
    assert torch.equal(pages._host[order], plain._host[order])
    kv[:, :, :30] = 0
    back = [PageCopy(slot, 39 - page) for page, slot in enumerate(order)]
    assert pages.fetch(back)() == 0
    assert torch.equal(kv[:, :, [copy.page for copy in back]], before[:, :, : len(order)])
    kv[:, :, [copy.page for copy in back]] = 0
    assert pages.begin(back)() == 0
    assert torch.equal(kv[:, :, [copy.page for copy in back]], before[:, :, : len(order)])
    pages._host[order[5], 9] += 1
    assert pages.fetch(back)() == pages.begin(back)() == 1


def test_pages_of_a_gpu_come_from_the_disk_in_parts(fake_streams, tmp_path):
    kv = torch.randn(3, 2, 40, 4, 2, 8)
    pages = CudaRankPages(
        [page_words(kv)], torch.zeros(20, 3 * 2 * 32 + 1, dtype=torch.int64), 30, 4
    )
    pages.file = PageFile(tmp_path, 1 << 20, pages.row_bytes)
    before, keys = kv.clone(), [bytes([which] * 32) for which in range(9)]
    pages.store([PageCopy(slot, slot) for slot in range(9)])
    assert pages.write([DiskCopy(8 - slot, slot, keys[slot]) for slot in range(9)])() == 0
    pages._host[:6] = 0  # the others stay in host memory
    kv[:, :, :9] = 0
    reads = [DiskCopy(8 - slot, 9 + slot, keys[slot]) for slot in range(6)]
    copies = [PageCopy(9 + slot if slot < 6 else slot, 20 + slot) for slot in range(9)]
    assert pages.fetch(copies, reads)() == 0
    assert torch.equal(kv[:, :, 20:29], before[:, :, :9])
    wrong = [each._replace(key=keys[8]) for each in reads]
    assert pages.fetch(copies, wrong)() == 6


def test_a_fetch_that_fails_on_a_gpu_ends_its_copies_before_its_pages_are_free(
    fake_streams, monkeypatch
):
    kv = torch.zeros(3, 2, 40, 4, 2, 8)
    pages = CudaRankPages(
        [page_words(kv)], torch.zeros(40, 3 * 2 * 32 + 1, dtype=torch.int64), 30, 4
    )
    places, ended = pages._pages_of, pages._fetching.ends

    def fail(copies):
        if len(copies) < 4:
            raise torch.OutOfMemoryError("a test")
        return places(copies)

    monkeypatch.setattr(pages, "_pages_of", fail)
    with pytest.raises(torch.OutOfMemoryError):
        pages.fetch([PageCopy(at, at) for at in range(6)])()
    assert pages._fetching.ends == ended + 1


def test_a_fetch_that_fails_in_the_leader_goes_on_until_the_other_ranks_have_ended_theirs():
    def fail():
        raise torch.OutOfMemoryError("a test")

    own = SimpleNamespace(device=torch.device("cpu"), fetch=lambda *_: fail)
    others, over = RankCopies(1), threading.Event()
    ranks = SimpleNamespace(expect_copy=lambda _: others, send=lambda _: None)
    copies = PageCopies(RankMemory(own, 4), 8, 0, ranks, over.set)
    fetch = Fetch(Arrival({}), (PageCopy(0, 0),), [])
    copies._begin_fetch(fetch)
    assert not over.wait(0.1)
    others.add(0)
    assert over.wait(10)
    assert copies._under_way[fetch].result() == 1
    copies.close()
