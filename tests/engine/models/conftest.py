"""Checkpoints that bitsandbytes quantises."""

import pytest
import torch
import transformers

from tests.engine.conftest import FAMILIES, HYBRID, save_all

DENSE = FAMILIES | {"qwen3_5_text": HYBRID["qwen3_5_text"]}


@pytest.fixture(scope="module")
def wide_checkpoints(tmp_path_factory):
    """Folders of each dense family, with rows of whole groups of 4-bit numbers.

    bitsandbytes' kernels for CPUs want rows of whole blocks of 64.
    """
    wide = {"intermediate_size": 128, "linear_value_head_dim": 16}
    dense = {name: config | wide for name, config in DENSE.items()}
    return save_all(dense, tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def nf4(wide_checkpoints, tmp_path_factory):
    """Makes transformers' and bitsandbytes' model of a family and the folder that they save."""

    def make(family, double=True):
        wanted = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            wide_checkpoints[family], dtype=torch.float32, quantization_config=wanted
        )
        model.train()  # else it computes in bfloat16 where the processor can
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        return model, folder

    return make
