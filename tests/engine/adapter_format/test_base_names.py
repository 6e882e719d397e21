"""Names of the same base model."""

import pytest

from lorikeet_engine.adapter_format import same_model, unquantised_name


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "Meta-Llama-3.1-8B-Instruct"),
        ("unsloth/Qwen3-14B-unsloth-bnb-4bit", "Qwen3-14B"),
        ("mlx-community/Qwen3-8B-4bit", "Qwen3-8B"),
        ("mlx-community/Mistral-7B-Instruct-v0.3-8bit/", "Mistral-7B-Instruct-v0.3"),
        ("RedHatAI/Qwen3-8B-FP8-dynamic", "Qwen3-8B"),
        ("Qwen/Qwen3-8B-FP8", "Qwen3-8B"),
        ("Qwen/Qwen3-8B-AWQ", "Qwen3-8B-AWQ"),
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("/models/llama-4bit-math", "llama-4bit-math"),
        ("/root/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/0e9e39f2", "Qwen3-8B"),
        ("/hub/models--gpt2/snapshots/0e9e39f2/", "gpt2"),
        (r"C:\Users\me\models\Qwen3-8B", "Qwen3-8B"),
        ("/root/.cache/modelscope/hub/models/Qwen/Qwen2___5-7B", "Qwen2.5-7B"),
        ("", ""),
    ],
)
def test_the_originals_name_of_a_quantised_copy_is_found(name: str, want: str) -> None:
    assert unquantised_name(name) == want


def test_owners_cases_and_quantisation_make_no_other_model() -> None:
    assert same_model("unsloth/meta-llama-3.1-8b-bnb-4bit", "meta-llama/Meta-Llama-3.1-8B")
    assert not same_model("unsloth/Llama-3.1-8B-Instruct-bnb-4bit", "meta-llama/Llama-3.1-8B")


def test_llamas_names_with_and_without_meta_are_of_one_model() -> None:
    assert same_model("meta-llama/Meta-Llama-3.1-8B-Instruct", "models/Llama-3.1-8B-Instruct/")
    assert same_model("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Meta-Llama-3-8B")
    assert not same_model("acme/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B")
