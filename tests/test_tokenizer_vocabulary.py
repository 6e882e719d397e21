"""Reading a tokenizer's vocabulary, and the warning when it differs from the base model's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lorikeet import tokenizer_vocabulary
from lorikeet.tokenizer_vocabulary import read_vocabulary, vocabulary_warning

DEMO = Path("demo/model")


def saved(folder: Path, change: Callable[[Any], object] = lambda _: None) -> Path:
    """Save the demo's tokenizer as a trainer would, after `change`."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    change(tokenizer)
    tokenizer.save_pretrained(folder)
    return folder


def warning(folder: Path) -> str | None:
    return vocabulary_warning(read_vocabulary(folder), read_vocabulary(DEMO), "llama")


def test_a_tokenizer_that_a_trainer_saved_unchanged_causes_no_warning(tmp_path: Path) -> None:
    assert read_vocabulary(DEMO) is not None
    assert warning(saved(tmp_path)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: tokenizer.add_special_tokens(
            {"additional_special_tokens": ["<|tool|>", "<|end_tool|>"]}
        ),
        lambda tokenizer: tokenizer.add_tokens(["<|tool|>", "<|end_tool|>"]),
    ],
)
def test_tokens_that_training_added_cause_a_warning_that_names_them(
    change: Callable[[Any], object], tmp_path: Path
) -> None:
    said = warning(saved(tmp_path, change)) or ""
    assert "has 2 tokens that llama lacks or numbers otherwise (<|tool|>, <|end_tool|>)" in said


def edited(folder: Path, edit: Callable[[Any], object]) -> Path:
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    edit(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_renamed_reserved_token_causes_a_warning(tmp_path: Path) -> None:
    said = warning(edited(tmp_path, lambda it: it["added_tokens"][-1].update(content="<|mine|>")))
    assert "1 tokens that llama lacks or numbers otherwise (<|mine|>)" in (said or "")


def test_another_vocabulary_causes_a_warning(tmp_path: Path) -> None:
    said = warning(edited(tmp_path, lambda it: it["model"]["vocab"].update({"zzz": 4000})))
    assert "has another vocabulary than llama" in (said or "")


def test_fewer_added_tokens_than_the_base_models_cause_no_warning(tmp_path: Path) -> None:
    assert warning(edited(tmp_path, lambda it: it["added_tokens"].pop())) is None


def test_added_tokens_of_a_slow_tokenizer_are_compared(tmp_path: Path) -> None:
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|tool|>": 999}))
    assert "(<|tool|>)" in (warning(tmp_path) or "")


def test_a_vocabulary_of_pieces_with_scores_is_one_of_their_places(tmp_path: Path) -> None:
    pieces = [["<unk>", 0.0], ["a", -1.5], ["b", -2.5]]
    model = {"type": "Unigram", "vocab": pieces}
    for name, scores in (("one", 0.0), ("other", 1.0)):
        (tmp_path / name).mkdir()
        shifted = [[piece, score + scores] for piece, score in pieces]
        (tmp_path / name / "tokenizer.json").write_text(
            json.dumps({"model": {**model, "vocab": shifted}, "added_tokens": []})
        )
    one, other = (read_vocabulary(tmp_path / name) for name in ("one", "other"))
    assert one is not None
    assert one == other


@pytest.mark.parametrize(
    "content",
    ["no JSON", "[]", "{}", '{"model": {}}', '{"model": {"vocab": {}}, "added_tokens": [{}]}'],
)
def test_a_file_that_is_no_tokenizer_is_left_out(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    assert read_vocabulary(tmp_path) is None
    assert warning(tmp_path) is None


def test_large_files_and_many_added_tokens_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    monkeypatch.setattr(tokenizer_vocabulary, "MAX_ADDED", 1)
    assert read_vocabulary(tmp_path) is None
    monkeypatch.undo()
    monkeypatch.setattr(tokenizer_vocabulary, "MAX_TOKENIZER_BYTES", 100)
    assert read_vocabulary(tmp_path) is None
