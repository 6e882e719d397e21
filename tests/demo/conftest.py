"""The demo's model and tokenizer as transformers loads them, in float32."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # takes seconds, which test_make_serve does not need
    from transformers import PreTrainedModel
    from transformers import PreTrainedTokenizerFast as Tokenizer

MODEL = Path(__file__).parents[2] / "demo" / "model"


@pytest.fixture(scope="session")
def tokenizer() -> "Tokenizer":
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def base() -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
