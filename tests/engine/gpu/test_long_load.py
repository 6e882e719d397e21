"""Replica of two GPUs under requests of every kind at once, until its follower is killed.

TEST_LOAD_S sets the duration. The form on a CPU, with two processes, is short and part of `make
soak`.
"""

import json
import os
import random
import threading
import time
from collections import Counter
from functools import partial
from itertools import count, pairwise
from pathlib import Path

import psutil
import pytest
import torch

from loadtest.engine.random_checkpoint import write_checkpoint
from loadtest.engine.random_model import LLAMA_3_1_8B
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.process.client import EngineProcessClient
from lorikeet_engine.request import Failed, PromptLogprobs, Request
from lorikeet_engine.telemetry.status import AdapterStatus
from tests.engine.blobs import Shelf
from tests.engine.descending_grammar import DescendingGrammars
from tests.engine.engine_driver import greedy, prompt
from tests.engine.process_engines import Blobs, followers
from tests.waiting import eventually

LOAD_S = float(os.environ.get("TEST_LOAD_S", "30"))
pytestmark = pytest.mark.timeout(LOAD_S + 300)
CONFIG = LLAMA_3_1_8B | {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2048,
}
RANKS = (4, 8, 16, 33)
ADAPTERS = 24
GPU_ELEMENTS = 2 << 20  # on each GPU, for a third of the adapters
HOST_ELEMENTS = 6 << 20  # for half of the adapters
KV_TOKENS = 1600  # for a sixth of max_running sequences
RUNNING = 32
OUTSTANDING = 48
PREFIX = 160  # tokens that an adapter's prompts share
# Of a prompt's log probabilities: in bfloat16, sums have another order in each batch; on a CPU the
# sums are in float32. An adapter changes log probabilities by more than 1.
TOLERANCE = {"cuda": 0.1, "cpu": 1e-3}
# With it adapters add up to half of a linear's output, and rounding to bfloat16 alone changes log
# probabilities by 0.02 at most. With 8 they add up to 90 times a linear's output, and 0.6.
ALPHA = 0.05
KINDS = ("greedy", "sampled", "several", "penalized", "structured", "scored")


class Mix:
    """Makes requests of every kind, and checks their results on the client's thread.

    expected: log probabilities of each adapter's scored prompt, from a time when nothing else
    ran.
    """

    def __init__(self, refs: list[AdapterRef]) -> None:
        self._refs: list[AdapterRef | None] = [None, *refs]
        self._chance, self._numbers = random.Random(1), count()
        self._asked: dict[str, Request] = {}
        self._said: dict[tuple[str, int], list[int]] = {}
        self._scores: dict[str, list[float]] = {}
        self.expected: dict[AdapterRef | None, torch.Tensor] = {}
        self.left: dict[str, int] = {}  # choices that have not ended
        self._leaving = threading.Lock()
        self.ended: Counter[str] = Counter()
        self.tokens, self.wrong, self.error = 0, [], 0.0

    def request(self, kind: str, of: int) -> Request:
        """Make and await a request; of: number of an adapter, or 0 for the base model."""
        chance, number = self._chance, next(self._numbers)
        request_id, adapter = f"{kind}-{number}", self._refs[of]
        if kind == "scored":
            ids, more = prompt(200, of), {"max_tokens": 1, "prompt_logprobs": 0}
        else:
            ids = prompt(PREFIX, of) + prompt(chance.randint(1, 150), number)
            more = {"max_tokens": chance.randint(1, 120), **_sampling(kind, number)}
        request = greedy(request_id, ids, adapter=adapter, **more)
        self._asked[request_id], self.left[request_id] = request, request.n
        return request

    def any(self) -> Request:
        """Make a request of a random kind and adapter."""
        return self.request(self._chance.choice(KINDS), self._chance.randint(0, ADAPTERS))

    def leaver(self) -> str | None:
        """In one of ten calls, return an awaited request to abort, which is no longer awaited."""
        awaited = tuple(self.left)
        if not awaited or self._chance.random() > 0.1:
            return None
        leaver = self._chance.choice(awaited)
        with self._leaving:
            self.left.pop(leaver, None)
        self.ended["left"] += 1
        return leaver

    def on_outputs(self, outputs: list) -> None:
        for output in outputs:
            if output.request_id not in self.left:  # an aborted request
                continue
            if isinstance(output, Failed):
                self.wrong.append(f"{output.request_id}: {output.error}")
                self.left.pop(output.request_id, None)
            elif isinstance(output, PromptLogprobs):
                told = self._scores.setdefault(output.request_id, [])
                told.extend(score.logprob for score in output.logprobs)
            else:
                said = self._said.setdefault((output.request_id, output.choice), [])
                said.extend(output.token_ids)
                self.tokens += len(output.token_ids)
                if output.finish is not None:
                    del self._said[output.request_id, output.choice]
                    self._end(self._asked[output.request_id], said)

    def _end(self, request: Request, said: list[int]) -> None:
        kind = request.request_id.partition("-")[0]
        if kind == "structured":
            right = all(one > other for one, other in pairwise(said))
        else:
            right = len(said) == request.sampling.max_tokens
        if not right:
            self.wrong.append(f"{request.request_id} says {said}")
        if kind == "scored":
            told = torch.tensor(self._scores.pop(request.request_id))
            want = self.expected.setdefault(request.adapter, told)
            self.error = max(self.error, float((told - want).square().mean().sqrt()))
        self.ended[kind] += 1
        with self._leaving:
            left = self.left.get(request.request_id, 0) - 1
            if left > 0:
                self.left[request.request_id] = left
            else:
                self.left.pop(request.request_id, None)


def _sampling(kind: str, seed: int) -> dict:
    drawn = {"temperature": 1.0, "seed": seed}
    return {
        "greedy": {},
        "sampled": {**drawn, "top_p": 0.9, "logprobs": 1},
        "several": {**drawn, "n": 3},
        "penalized": {"repetition_penalty": 1.2, "presence_penalty": 0.5},
        "structured": {**drawn, "grammar": "below 3000, end under 400"},
    }[kind]


@pytest.fixture
def refs(tmp_path):
    """Adapters of mixed ranks; every third only has attention's linears."""
    write_checkpoint(tmp_path / "model", CONFIG, torch.device("cpu"))
    shape = BaseShape.from_config(json.loads((tmp_path / "model" / "config.json").read_text()))
    shelf, refs = Shelf(tmp_path / "made"), []
    (tmp_path / "blobs").mkdir()
    for number in range(ADAPTERS):
        linears = range(len(shape.linears) if number % 3 else 4)
        places = [(layer, linear) for layer in range(shape.layers) for linear in linears]
        rank = RANKS[number % len(RANKS)]
        refs.append(shelf.make(f"a{number}", dict.fromkeys(places, rank), alpha=ALPHA, shape=shape))
        blob = shelf.blob(refs[-1].name).read_bytes()
        (tmp_path / "blobs" / refs[-1].digest).write_bytes(blob)
    return refs


def engine_of(folder: Path, device: str) -> Engine:
    torch.set_num_threads(1)
    dtype = "bfloat16" if device == "cuda" else "float32"
    itemsize = 2 if device == "cuda" else 4
    token_bytes = 2 * itemsize * CONFIG["num_hidden_layers"] * CONFIG["head_dim"]  # a KV head each
    settings = EngineSettings(
        folder / "model",
        folder / "cache",
        device=device,
        dtype=dtype,
        adapter_dtype=dtype,
        kv_bytes=KV_TOKENS * token_bytes,
        max_context=1024,
        max_running=RUNNING,
        max_batch_tokens=512,
        max_batch_adapters=8,
        adapter_gpu_bytes=GPU_ELEMENTS * itemsize,
        adapter_host_bytes=HOST_ELEMENTS * itemsize,
        tensor_parallel=2,
    )
    return Engine(settings, Blobs(folder / "blobs"), grammars=DescendingGrammars())


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.soak),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
            ],
        ),
    ],
)
def test_every_kind_of_request_is_answered_until_a_follower_is_killed(refs, tmp_path, device):
    mix, ended = Mix(refs), threading.Event()
    build = partial(engine_of, tmp_path, device)
    client = EngineProcessClient(build, mix.on_outputs, lambda _: ended.set(), lambda _: None)
    for adapter in range(ADAPTERS + 1):  # alone, for reference scores
        client.submit(mix.request("scored", adapter)).result()
        assert eventually(lambda: not mix.left, 30)
    base = mix.expected[None]
    changes = [(mix.expected[ref] - base).square().mean().sqrt() for ref in refs]
    assert min(changes) > 3 * TOLERANCE[device], "an adapter does nothing"

    until_s = time.monotonic() + LOAD_S
    while time.monotonic() < until_s and not mix.wrong and not ended.is_set():
        assert eventually(lambda: len(mix.left) < OUTSTANDING, 60)
        client.submit(mix.any()).result()
        if (leaver := mix.leaver()) is not None:
            client.abort(leaver).result()
    assert eventually(lambda: not mix.left, 60)
    assert not mix.wrong
    assert not ended.is_set()
    assert mix.error < TOLERANCE[device], "what adapters change is not what it was"
    assert set(mix.ended) == {*KINDS, "left"}
    assert eventually(lambda: not client.status.live.running, 5)
    _look(client, mix)

    for _ in range(OUTSTANDING):
        client.submit(mix.any()).result()
    (follower,) = followers()
    leader = follower.parent()
    assert leader is not None
    follower.kill()
    assert ended.wait(2.0)
    assert not psutil.wait_procs([leader, follower], 5.0)[1], "no process is left"
    client.close()


def _look(client: EngineProcessClient, mix: Mix) -> None:
    """Check that the load exercised every mechanism, and that no resource is held after it."""
    status = client.status
    gpu = status.tiers[Residency.GPU]
    print(mix.ended, mix.tokens, mix.error, status.preemptions, gpu.evictions)
    assert status.preemptions > 0
    assert gpu.evictions > 2 * ADAPTERS
    assert status.cached_tokens > 0
    assert gpu.checksum_failures == 0
    live = status.live
    assert (live.running, live.waiting, live.kv_pages_used) == (0, 0, 0)
    held = [AdapterStatus(*row) for row in client.adapters(Residency.GPU).result()]
    assert not any(adapter.leases for adapter in held)
