"""A reward model that TRL's RewardTrainer has trained gives the rewards that PEFT computes."""

import os
import subprocess
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from lorikeet.settings import Settings
from tests.engine.blob_shelf import BlobShelf
from tests.engine.engine_driver import Answers, build
from tests.engine.peft_adapters import classifier
from tests.engine.test_heads import pooling

PYTHON = "TRL_PYTHON"
"""Environment variable with a Python that has trl and peft."""
SCRIPT = Path(__file__).with_name("reward_training.py")
TEXTS = ("a is kind and calm.", "a!!!", "b is kind")


@pytest.mark.soak
@pytest.mark.skipif(PYTHON not in os.environ, reason=f"needs {PYTHON}, a Python with trl")
def test_a_reward_model_of_trl_scores_as_peft_does(tmp_path, close_later):
    base, saved = Settings.from_env({}).base_models["lorikeet-demo"], tmp_path / "reward"
    subprocess.run([os.environ[PYTHON], SCRIPT, base, saved], check=True, timeout=600)
    weights = load_file(saved / "adapter_model.safetensors")
    assert any(name.endswith("score.weight") for name in weights)
    shelf = BlobShelf(tmp_path / "blobs")
    ref = shelf.add(saved, "reward")
    assert len(ref.head.labels) == 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    engine = close_later(build(base, shelf, tmp_path / "cache"))
    answers = Answers(engine)
    answers.submit(pooling("r", *prompts, adapter=ref))
    answers.all()
    model = peft.PeftModel.from_pretrained(classifier(base, 1), saved).eval()
    for choice, ids in enumerate(prompts):
        with torch.inference_mode():
            want = model(torch.tensor([ids])).logits[0]
        got = torch.tensor(answers.pooled["r", choice])
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert answers.pooled["r", 0] > answers.pooled["r", 1]
