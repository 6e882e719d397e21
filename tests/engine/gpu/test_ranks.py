"""Several GPUs give the results of one; a replica ends when its follower is killed."""

import json
import multiprocessing
import random
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from loadtest.engine.random_checkpoint import write_checkpoint
from loadtest.engine.random_model import LLAMA_3_1_8B
from lorikeet_engine.adapter import AdapterRef
from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.engine import Engine, EngineSettings
from lorikeet_engine.errors import DeviceLost, EngineClosed
from lorikeet_engine.process.client import EngineProcessClient
from lorikeet_engine.request import Failed
from tests.engine.blobs import Shelf
from tests.engine.engine_driver import Answers, greedy, prompt
from tests.engine.process_engines import Blobs, has_ended, losing_a_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
CONFIG = LLAMA_3_1_8B | {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2048,
}
# olmo2 norms all heads together, by a sum; phi3's fused linears are cut in parts.
FAMILIES = {
    "llama": CONFIG,
    "olmo2": CONFIG | {"model_type": "olmo2", "rope_scaling": None},
    "phi3": CONFIG | {"model_type": "phi3", "rope_scaling": None},
}
WORLDS = [
    pytest.param(gpus, id=f"{gpus}-gpus")
    for gpus in (2, 4, 8)
    if gpus <= max(2, torch.cuda.device_count())
]
RANKS = (4, 8, 16, 33)
TOKENS = 200  # of the shortest prompt
LOAD_S = 20.0
# Of log probabilities in bfloat16, whose sums have another order.
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    config = FAMILIES[getattr(request, "param", "llama")]
    folder = tmp_path_factory.mktemp("ranks")
    write_checkpoint(folder / "model", config, torch.device("cuda"))
    return folder


@pytest.fixture(scope="module")
def refs(folder):
    shape = BaseShape.from_config(json.loads((folder / "model" / "config.json").read_text()))
    shelf, linears = Shelf(folder / "made"), range(len(shape.linears))
    everywhere = [(layer, linear) for layer in range(shape.layers) for linear in linears]
    (folder / "blobs").mkdir()
    refs = [shelf.make(f"r{r}", dict.fromkeys(everywhere, r), shape=shape) for r in RANKS]
    for ref in refs:
        (folder / "blobs" / ref.digest).write_bytes(shelf.blob(ref.name).read_bytes())
    return refs


def engine_of(folder: Path, gpus: int) -> Engine:
    """Engine with space on each GPU for two or three of the adapters."""
    settings = EngineSettings(
        folder / "model",
        folder / f"cache-{gpus}",
        device="cuda",
        dtype="bfloat16",
        adapter_dtype="bfloat16",
        kv_bytes=64 << 20,
        max_running=32,
        max_batch_adapters=4,
        adapter_gpu_bytes=6 << 20,
        tensor_parallel=gpus,
    )
    return Engine(settings, Blobs(folder / "blobs"))


def logprobs(folder: Path, refs: list[AdapterRef], gpus: int) -> torch.Tensor:
    """Return [1 + adapters, tokens], of prompts under the base model and each adapter.

    On CUDA a process can form only one rank group, so each engine has its own process.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return torch.tensor(pool.submit(_logprobs, folder, refs, gpus).result())


def _logprobs(folder: Path, refs: list[AdapterRef], gpus: int) -> list[list[float]]:
    engine = engine_of(folder, gpus)
    answers = Answers(engine)
    for i, ref in enumerate([None, *refs]):
        ids = prompt(TOKENS + i, i)
        answers.submit(greedy(f"{i}", ids, adapter=ref, max_tokens=24, prompt_logprobs=0))
    answers.until(lambda: not answers.pending, timeout_s=120)
    engine.close()
    assert not answers.errors
    told = [[s.logprob for s in answers.scores[f"{i}", 0]] for i in range(len(refs) + 1)]
    return [each[: TOKENS - 1] for each in told]


@pytest.mark.parametrize("gpus", WORLDS)
@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_prompts_have_equal_log_probabilities_on_one_gpu_and_several(folder, refs, gpus):
    one, several = (logprobs(folder, refs, count) for count in (1, gpus))
    assert (one - several).square().mean().sqrt() < TOLERANCE
    assert one[0].sub(one[1]).square().mean().sqrt() > 3 * TOLERANCE, "what adapters change"


@pytest.mark.parametrize("gpus", WORLDS)
def test_load_with_adapter_churn_is_served_until_a_follower_is_killed(folder, refs, gpus):
    ended, failed, tokens = threading.Event(), [], [0]

    def on_outputs(outputs):
        failed.extend(output for output in outputs if isinstance(output, Failed))
        tokens[0] += len(outputs)

    client = EngineProcessClient(
        partial(engine_of, folder, gpus), on_outputs, lambda _: ended.set(), lambda _: None
    )
    chance, until_s = random.Random(1), time.monotonic() + LOAD_S
    for number in range(100_000):
        if time.monotonic() > until_s:
            break
        ref = chance.choice([None, *refs])
        ids, more = prompt(chance.randint(1, 300), number), {"temperature": chance.choice([0, 1.0])}
        client.submit(greedy(f"{number}", ids, adapter=ref, max_tokens=64, **more)).result()
        time.sleep(0.02)
    assert not failed
    assert tokens[0] > 100 * LOAD_S
    (leader,) = (p for p in psutil.Process().children() if "process.server" in str(p.cmdline()))
    others = [p for p in leader.children() if "process.follower" in str(p.cmdline())]
    assert len(others) == gpus - 1
    others[-1].kill()
    assert ended.wait(2.0)
    assert not psutil.wait_procs([leader, *others], 5.0)[1], "no process is left"
    with pytest.raises(EngineClosed):
        client.submit(greedy("late", prompt(5))).result()
    client.close()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_lost_during_graph_capture_ends_the_start(folder, tmp_path, sent):
    build = partial(losing_a_rank, "capture", sent, partial(engine_of, folder, 2), tmp_path)
    with pytest.raises((EngineClosed, DeviceLost)):
        EngineProcessClient(build, lambda _: None, lambda _: None, lambda _: None)
    lost = tmp_path / "lost"
    assert time.time() - lost.stat().st_mtime < 7.0
    assert has_ended(int(lost.read_text()))
