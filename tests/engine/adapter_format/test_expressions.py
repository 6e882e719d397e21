"""Expressions in adapter_config.json: matches, and limits of time and memory."""

import subprocess

import pytest

from lorikeet_engine.adapter_format import expressions
from lorikeet_engine.adapter_format.expressions import Expressions
from lorikeet_engine.errors import AdapterRejected


@pytest.fixture
def run():
    with Expressions() as run:
        yield run


def test_the_first_expression_with_a_full_match_counts(run):
    asked = [r".*\.v_proj", r"(.*\.)?(q_proj)", r".*_proj", "o_proj"]
    texts = ["a.v_proj", "a.q_proj", "aq_proj", "o_proj", "q_proj.a"]
    found = run.first_matches(asked, texts, "rank_pattern")
    assert found == {"a.v_proj": 0, "a.q_proj": 1, "aq_proj": 2, "o_proj": 2}
    assert run.first_matches([], texts, "rank_pattern") == {}


def test_a_name_for_each_of_a_thousand_modules_is_within_the_budget(run):
    names = [f"model.layers.{layer}.{part}" for layer in range(125) for part in "abcdefgh"]
    asked = [rf"(.*\.)?({name})" for name in names]
    found = run.first_matches(asked, names, "rank_pattern")
    assert [names[number] for number in found.values()] == names


def test_an_expression_that_takes_too_much_memory_is_refused(run, monkeypatch):
    monkeypatch.setattr(expressions, "_MEMORY_BYTES", 1 << 20)
    with pytest.raises(AdapterRejected, match="too much memory") as refused:
        run.first_matches([f"(a|b){{{'9' * 3}}}" * 9], ["a" * 9000], "target_modules")
    assert refused.value.field == "target_modules"


def test_the_child_process_ends_with_the_context(monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )
    with Expressions() as run:
        for _ in range(2):
            run.first_matches(["a"], ["a"], "target_modules")
    (process,) = started
    assert process.poll() is not None
