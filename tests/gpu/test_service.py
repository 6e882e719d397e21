"""Whole service with models of real shapes: register, pin, ask, kill a replica, ask again.

Over HTTP, with the catalog on S3. A small form runs on a CPU.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.load import PAUSE_S, Load, Outcome, Target
from tests.engine.float32_reference import TOLERANCE
from tests.engine.process_engines import followers
from tests.gpu.fleet import TENANT, replica_processes
from tests.gpu.peft_model import Reference
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(900)
TOKENS = 24
LENGTHS = (5, 300)
PINNED, COLD = "r64", "r8"
ENDED_S = 5.0  # time for a client to learn of a lost rank
EXACT = 1e-3  # on a CPU all is float32, and only the order of sums differs


@pytest.fixture(scope="module")
def registered(fleet, adapters):
    """Names of the registered adapters, one of which is pinned to every replica."""
    for name, folder in adapters.items():
        options = ("--base-model", fleet.shape)
        fleet.lorikeet("register", str(folder), f"{TENANT}/{name}", *options)
    fleet.lorikeet("pin", f"{TENANT}/{PINNED}", "--reason", "test")
    return list(adapters)


@pytest.fixture(scope="module")
def reference(fleet, adapters, device):
    return Reference(fleet.model, adapters, device)


def test_a_pinned_adapter_is_loaded_on_every_gpu_and_used_from_there(fleet, registered):
    pinned = f"{TENANT}/{PINNED}"
    assert eventually(lambda: len(fleet.holders(pinned)) == fleet.count, within_s=60)
    assert fleet.ask(pinned, fleet.prompt(5, 1), 4).residency == "gpu"


def test_an_unpinned_adapter_is_fetched_once_and_stays(fleet, registered):
    cold = f"{TENANT}/{COLD}"
    first = fleet.ask(cold, fleet.prompt(5, 2), 4)
    assert first.residency == "remote"
    assert eventually(lambda: first.replica in fleet.holders(cold), within_s=10)
    assert eventually(  # once both gateways know
        lambda: fleet.ask(cold, fleet.prompt(5, 3), 4).residency == "gpu", within_s=10
    )


def test_concurrent_greedy_answers_under_all_adapter_ranks_equal_pefts(
    fleet, registered, reference, device
):
    """Judge each token given those before it, so that an early difference is not counted twice."""
    tolerance = TOLERANCE if device == "cuda" else EXACT
    asked = [(name, fleet.prompt(length, 4)) for name in (None, *registered) for length in LENGTHS]

    def ask(adapter, prompt):
        model = fleet.shape if adapter is None else f"{TENANT}/{adapter}"
        return fleet.ask(model, prompt, TOKENS)

    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(lambda one: ask(*one), asked))
    for (adapter, prompt), answer in zip(asked, answers, strict=True):
        want = reference.logprobs(adapter, prompt, answer.tokens)
        errors = [
            abs(told - float(row[token]))
            for token, told, row in zip(answer.tokens, answer.logprobs, want, strict=True)
        ]
        assert max(errors) <= tolerance, f"{adapter}, {len(prompt)} tokens: {errors}"
        best = want.topk(2).values
        clear = (best[:, 0] - best[:, 1] > tolerance).tolist()
        likeliest = want.argmax(-1).tolist()
        told = zip(answer.tokens, likeliest, clear, strict=True)
        assert all(token == best for token, best, is_clear in told if is_clear), adapter
        if adapter is not None:
            change = want - reference.logprobs(None, prompt, answer.tokens)
            assert change.square().mean().sqrt() > tolerance / 5, "this adapter does nothing"


def test_a_killed_replica_cuts_only_its_own_streams_and_the_other_continues(fleet, registered):
    if fleet.count < 2:
        pytest.skip("needs two replicas")
    pinned = f"{TENANT}/{PINNED}"
    load = Load(fleet.running.url, [Target(pinned, fleet.key)], streams=24, tokens=400)
    with load:
        load.wait_for(24)
        before = fleet.holders(pinned)
        os.kill(replica_processes()[0], signal.SIGKILL)
        load.wait_for(24)
    unfinished = load.unfinished()
    assert {result.outcome for result in unfinished} == {Outcome.ENDED}, unfinished
    assert len({result.replica for result in unfinished}) == 1
    assert all("send the request again" in result.error for result in unfinished)
    (left,) = fleet.holders(pinned) & before
    answer = fleet.ask(pinned, fleet.prompt(5, 5), 4)
    assert (answer.residency, answer.replica) == ("gpu", left)
    assert eventually(lambda: len(fleet.holders(pinned)) == fleet.count, within_s=240)


def test_a_killed_follower_cuts_only_its_replicas_streams_and_the_replica_is_replaced(
    fleet, registered
):
    if fleet.tensor_parallel < 2:
        pytest.skip("a replica of one GPU has no follower")
    pinned = f"{TENANT}/{PINNED}"
    assert eventually(lambda: len(fleet.holders(pinned)) == fleet.count, within_s=60)
    started = followers()
    assert len(started) == fleet.count * (fleet.tensor_parallel - 1)
    load = Load(fleet.running.url, [Target(pinned, fleet.key)], streams=24, tokens=400)
    with load:
        load.wait_for(24)
        time.sleep(2 * PAUSE_S)  # or all ended together and the next have begun
        killed_s = time.monotonic()
        started[0].kill()
        load.wait_for(24, within_s=240)
    unfinished = load.unfinished()
    ended = [result for result in unfinished if result.outcome is Outcome.ENDED]
    (lost,) = {result.replica for result in ended}
    assert all("send the request again" in result.error for result in ended)
    assert all(result.sent_s < killed_s + ENDED_S for result in ended)
    assert all(result.ended_s < killed_s + ENDED_S for result in ended)
    # While no replica is left, requests are refused until a new one has started.
    refused = [result for result in unfinished if result.outcome is Outcome.REFUSED]
    assert len(ended) + len(refused) == len(unfinished), load.counts()
    assert all(result.status == 503 and result.retry_after for result in refused), refused[:3]
    assert fleet.count == 1 or not refused
    assert eventually(lambda: len(fleet.holders(pinned)) == fleet.count, within_s=240)
    assert lost not in fleet.holders(pinned)
    answer = fleet.ask(pinned, fleet.prompt(5, 6), 4)
    assert answer.residency == "gpu"
    assert len(followers()) == len(started), "no process of the lost replica is left"
