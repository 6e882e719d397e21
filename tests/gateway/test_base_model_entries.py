"""A base model's entry has the quantization in which its weights are stored or served."""

import json

import pytest

from lorikeet.gateway.services import read_base_models
from lorikeet.settings import Settings

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("stored", "rounding", "entry"),
    [
        (None, "auto", None),
        (None, "nf4", "rounded to nf4"),
        (None, "fp8", "rounded to fp8"),
        (BLOCKS, "auto", "fp8"),
        (NF4, "auto", "nf4"),
        (NF4, "fp8", "nf4, rounded to fp8"),
        (NF4, "packed", "nf4, packed"),
    ],
)
def test_an_entry_says_how_the_weights_are_quantised(tmp_path, stored, rounding, entry):
    config = CONFIG | ({"quantization_config": stored} if stored else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = Settings.model_validate(
        {"base_models": f"tiny={tmp_path}", "weight_dtype": f"tiny={rounding}"}
    )
    assert read_base_models(settings)["tiny"].quantization == entry


def test_a_vision_language_model_has_the_entry_of_its_text_part(tmp_path):
    within = {"model_type": "mistral3", "text_config": CONFIG, "quantization_config": BLOCKS}
    (tmp_path / "config.json").write_text(json.dumps(within))
    settings = Settings.model_validate({"base_models": f"tiny={tmp_path}"})
    entry = read_base_models(settings)["tiny"]
    assert (entry.shape.family, entry.shape.layers) == ("llama", 2)
    assert entry.quantization == "fp8"


def test_a_base_model_whose_pipeline_is_not_served_embeds_no_texts(tmp_path, caplog):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    settings = Settings.model_validate({"base_models": f"tiny={tmp_path}"})
    assert read_base_models(settings)["tiny"].embedder is not None
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Pooling", "Dense")]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert read_base_models(settings)["tiny"].embedder is None
    (record,) = caplog.records
    assert (record.msg, record.folder) == ("embeddings_off", str(tmp_path))
    assert record.error.startswith("modules.json: Pooling, Dense: want Transformer, Pooling")
