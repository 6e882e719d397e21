"""The demo's model and tokenizer as transformers loads them, in float32."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerFast as Tokenizer

from demo.train import FOLDER


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return AutoTokenizer.from_pretrained(FOLDER / "model")


@pytest.fixture
def base() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER / "model", dtype=torch.float32)
