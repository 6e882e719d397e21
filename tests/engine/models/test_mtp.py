"""The head for multi-token prediction computes what the published one does."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorikeet_engine.adapter_format import Quantization
from lorikeet_engine.errors import ModelError, SettingsError
from lorikeet_engine.execution.kv_tensors import kv_shape
from lorikeet_engine.models.llama import LlamaModel, load_model, rehearse_load
from lorikeet_engine.settings import EngineSettings
from tests.engine.models.test_models import Run, assert_equal, prompt_of
from tests.engine.mtp_heads import head_logits, with_head

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_logits_equal_a_plain_heads_however_the_prompt_is_cut(
    name, tiny_checkpoints, paged_tokens, tmp_path, monkeypatch
):
    folder = with_head(tiny_checkpoints[name], tmp_path / name)
    prompt = prompt_of(63)
    want = head_logits(folder, prompt)
    model = load_model(folder, CPU, torch.float32, mtp=True)
    run, logits = Run(folder, paged_tokens(), model=model), []

    def predict(*of_step):
        logits.append(LlamaModel.predict(model, *of_step))
        return logits[-1]

    monkeypatch.setattr(model, "predict", predict)
    for start, end, predicts in ((0, 20, True), (20, 40, False), (40, 41, True), (41, 62, True)):
        batch = run.tokens.batch({"a": prompt[start:end]})
        run.runner.forward(batch)
        following = torch.tensor(prompt[start + 1 : end + 1])
        run.runner.predict(batch, following, predicts=predicts)
    assert_equal(torch.cat(logits), torch.cat([want[:20], want[40:]]))


def refused(folder, rounding=None):
    with pytest.raises(ModelError, match=r"speculation=mtp: .*want lookup or off") as error:
        rehearse_load(folder, torch.float32, rounding=rounding, mtp=True)
    assert error.value.field == "speculation"
    return str(error.value)


def test_a_head_that_cannot_be_served_is_refused_by_name(tiny_checkpoints, tmp_path):
    hybrid = tiny_checkpoints["qwen3_5_text"]
    assert "has no MTP head, tensors mtp.*" in refused(hybrid)
    assert "Llama has no MTP head" in refused(tiny_checkpoints["llama"])
    folder = with_head(hybrid, tmp_path / "head")
    assert "beside linears of floats alone" in refused(folder, Quantization.FP8)
    tensors = load_file(folder / "model.safetensors")
    more = {"mtp.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    assert "mtp.embed_tokens.weight" in refused(folder)
    with pytest.raises(SettingsError, match="tensor_parallel=2: the MTP head"):
        EngineSettings(folder, tmp_path, speculation="mtp", tensor_parallel=2)
    del tensors["mtp.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"tensor mtp.layers.0.mlp.up_proj.weight is missing"):
        rehearse_load(folder, torch.float32, mtp=True)


def test_the_head_takes_memory_only_where_it_is_used(tiny_checkpoints, tmp_path):
    folder = with_head(tiny_checkpoints["qwen3_5_text"], tmp_path / "head")
    stored = load_file(folder / "model.safetensors").items()
    sizes = {name: each.nbytes for name, each in stored if name.startswith("mtp.")}
    plain, without = rehearse_load(folder, torch.float32)
    config, nbytes = rehearse_load(folder, torch.float32, mtp=True)
    assert nbytes - without == sum(sizes.values())
    shapes = [kv_shape(each, each.shape, 8, 16, "cpu") for each in (plain, config)]
    assert [shape[0] for shape in shapes] == [2, 3]
    assert (without, plain.mtp) == (
        rehearse_load(tiny_checkpoints["qwen3_5_text"], torch.float32)[1],
        None,
    )
