"""/tokenize and /detokenize answer as vLLM's, with the tokens of the base model's tokenizer."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.gateway.conftest import Gateway
from tests.gateway.test_bad_requests import error_of

TURNS = [{"role": "user", "content": "Tell me about a river."}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(Path("demo/model"))


def tokenize(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    answer = gateway.post("/tokenize", {"model": "tiny", **fields}).raise_for_status()
    body: dict[str, Any] = answer.json()
    return body


@pytest.mark.parametrize("special", [True, False])
def test_a_text_has_the_tokens_of_the_tokenizer(
    unchanged: Gateway, tokenizer: Any, special: bool
) -> None:
    text = "Tell me about a river. " * 100
    told = tokenize(unchanged, prompt=text, add_special_tokens=special)
    expected = tokenizer(text, add_special_tokens=special)["input_ids"]
    assert told == {
        "count": len(expected),
        "max_model_len": 4096,
        "tokens": expected,
        "token_strs": None,
    }


def test_special_tokens_are_added_by_default(unchanged: Gateway) -> None:
    usual, added = (
        tokenize(unchanged, prompt="river", **fields)
        for fields in ({}, {"add_special_tokens": True})
    )
    assert usual == added


def test_a_chat_has_the_tokens_of_its_template(unchanged: Gateway, tokenizer: Any) -> None:
    for begun in (True, False):
        told = tokenize(unchanged, messages=TURNS, add_generation_prompt=begun)
        expected = tokenizer.apply_chat_template(
            TURNS, add_generation_prompt=begun, return_dict=False
        )
        assert told["tokens"] == expected
    begun = [*TURNS, {"role": "assistant", "content": "It was "}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    told = tokenize(unchanged, messages=begun, **fields)
    assert tokenizer.decode(told["tokens"]).endswith("It was ")


def test_an_adapters_name_stands_for_its_base_model(unchanged: Gateway) -> None:
    base, adapter = (
        tokenize(unchanged, prompt="river", model=model) for model in ("tiny", "support")
    )
    assert base == adapter


def test_tokens_come_with_their_texts_if_asked(unchanged: Gateway, tokenizer: Any) -> None:
    told = tokenize(unchanged, prompt="a river", return_token_strs=True)
    assert told["token_strs"] == tokenizer.convert_ids_to_tokens(told["tokens"])


def test_tokens_are_converted_back_to_their_text(unchanged: Gateway, tokenizer: Any) -> None:
    text = "Tell me about a river."
    for special in (True, False):
        ids = tokenizer(text, add_special_tokens=special)["input_ids"]
        answer = unchanged.post("/detokenize", {"model": "tiny", "tokens": ids})
        assert answer.json() == {"prompt": tokenizer.decode(ids)}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": TURNS}, "prompt"),
        ("/tokenize", {"messages": TURNS, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "river " * 100_000}, "prompt"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    unchanged: Gateway, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = unchanged.post(path, {"model": "tiny", **fields})
    assert error_of(answer, 400)["param"] == param


def test_an_unknown_model_is_refused(unchanged: Gateway) -> None:
    for path, fields in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [4]})):
        answer = unchanged.post(path, {"model": "nothing", **fields})
        assert error_of(answer, 404)["code"] == "model_not_found"
