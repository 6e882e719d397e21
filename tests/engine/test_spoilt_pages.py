"""Pages and states that led to logits which are not finite are never shared."""

import pytest
import torch

from lorikeet_engine.errors import NotFinite
from lorikeet_engine.execution import batch_builder
from lorikeet_engine.request import Request, SamplingParams
from lorikeet_engine.scheduling.kv_cache import KVCache, PageKeys
from tests.engine import hash_model
from tests.engine.blobs import Shelf
from tests.engine.engine_driver import Answers

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = tuple(range(3, 23))
GREEDY = SamplingParams(12, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    "kept",
    [{}, {"windows": hash_model.WINDOWED}, {"states": True, "cached_states": 12}],
    ids=["pages", "windows", "states"],
)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("good_steps", [2, 3, 9])  # prompt, first decode, later
def test_pages_of_a_request_that_overflows_are_computed_again(
    tmp_path, monkeypatch, overlap, good_steps, kept
):
    monkeypatch.setattr(KVCache, "state_piece", hash_model.PAGE)  # states behind every page
    monkeypatch.setattr(batch_builder, "CHUNK", hash_model.PAGE)
    engine, model = hash_model.build(
        tmp_path,
        Shelf(tmp_path / "blobs"),
        kv_pages=1100,
        max_batch_tokens=8,
        max_running=4,
        overlap=overlap,
        **kept,
    )
    answers, steps, logits = Answers(engine), [], model.logits
    model.before = lambda batch: steps.append(batch)
    model.logits = lambda *given: logits(*given) * (torch.nan if len(steps) > good_steps else 1.0)
    answers.submit(Request("bad", (PROMPT,), GREEDY))
    answers.all()
    assert isinstance(answers.errors["bad"], NotFinite)
    keys = PageKeys(PROMPT, hash_model.PAGE).keys
    assert not any(key in pages for key in keys for pages in engine._cache._pages_of)
    assert engine._cache.states is None or engine._cache.states.cached == 0
    model.logits, model.tokens = logits, 0
    answers.submit(Request("good", (PROMPT,), GREEDY))
    answers.all()
    assert answers.of("good") == hash_model.predict(PROMPT, GREEDY, 0, 4096)[0]
    assert model.tokens >= len(PROMPT)
    engine.close()
