"""A decode step says the same from a graph as without one, whatever its size and its adapters."""

import pytest
import torch

from engine.benchmarks.random_adapters import Shelf
from engine.benchmarks.random_model import random_model, write_config
from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.engine import Engine, EngineSettings
from tests.engine.driving import Answers, greedy

CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Twice:
    """A runner that computes what fits a graph with and without it, and compares."""

    def __init__(self, runner):
        self.runner = runner
        self.compared = []

    def forward(self, batch):
        graphs = self.runner._graphs
        if not graphs.fit(batch):
            return self.runner.forward(batch)
        got = self.runner.forward(batch).clone()
        self.runner._graphs = None
        want = self.runner.forward(batch)
        self.runner._graphs = graphs
        atol = 8 * torch.finfo(torch.bfloat16).eps * want.abs().max().item()
        torch.testing.assert_close(got, want, rtol=0, atol=atol)
        top = want.topk(2).values
        clear = top[:, 0] - top[:, 1] > 2 * atol
        assert torch.equal(got.argmax(-1)[clear], want.argmax(-1)[clear])
        self.compared.append((len(want), len(batch.segments) if batch.segments else 0))
        return got


@pytest.fixture
def engine(tmp_path):
    shelf = Shelf(tmp_path / "blobs", BaseShape.from_config(CONFIG), count=5, rank=12)
    settings = EngineSettings(
        model=write_config(tmp_path / "model", CONFIG),
        cache_dir=tmp_path / "cache",
        device="cuda",
        dtype="bfloat16",
        adapter_dtype="bfloat16",
        max_running=12,
        max_batch_adapters=5,
        max_rank=16,
        kv_bytes=16 << 20,
    )
    engine = Engine(settings, shelf, random_model)
    engine.refs = shelf.refs
    yield engine
    engine.close()


def test_a_graph_says_what_the_plain_pass_says(engine):
    engine._runner = twice = Twice(engine._runner)
    answers = Answers(engine)
    for i in range(14):
        adapter = engine.refs[i % 5] if i % 3 else None
        prompt = [(7 * i + j) % 512 for j in range(1 + 9 * i)]
        answers.submit(greedy(f"r{i}", prompt, adapter=adapter, max_tokens=6 + 5 * i))
        answers.step()
    answers.all()
    assert not answers.errors
    rows, segments = zip(*twice.compared, strict=True)
    assert set(rows) >= {1, 3, 7, 11}
    assert set(segments) >= {1, 4, 5}


def test_base_requests_alone_use_a_graph_without_adapters(engine):
    engine._runner = twice = Twice(engine._runner)
    answers = Answers(engine)
    answers.submit(greedy("r", [5, 6, 7], max_tokens=20))
    answers.all()
    assert twice.compared == [(1, 0)] * 19
