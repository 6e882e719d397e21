"""Adapters of a mixture of experts' attention and router, as releases with linear routers saved."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.engine.conftest import MOE
from tests.engine.engine_driver import Answers, build
from tests.engine.peft_world import PeftWorld, ask, bring_all

ATTENTION = {"rank8_qkvo": {"r": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}}
ROUTER_RANK, ROUTER_ALPHA = 4, 8


def save_router_adapter(checkpoint, folder):
    """A PEFT folder for routers and q_proj, as of releases whose routers are linears; the deltas.

    PEFT's of today finds no linear there.
    """
    random, tensors, deltas = torch.Generator().manual_seed(5), {}, {}
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    for name, weight in model.named_parameters():
        if name.endswith(("mlp.gate.weight", "q_proj.weight")):
            d_out, d_in = weight.shape
            a = torch.randn(ROUTER_RANK, d_in, generator=random) * 0.3
            b = torch.randn(d_out, ROUTER_RANK, generator=random) * 0.3
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            deltas[name] = ROUTER_ALPHA / ROUTER_RANK * b @ a
    config = {"r": ROUTER_RANK, "lora_alpha": ROUTER_ALPHA, "target_modules": ["gate", "q_proj"]}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return deltas


class RouterWorld(PeftWorld):
    """With an adapter of routers, too, whose answers are those of a base model with it merged."""

    def __init__(self, checkpoint, folder):
        super().__init__(checkpoint, folder, ATTENTION, tokens=24)
        self._deltas = save_router_adapter(checkpoint, folder / "router")
        self.names = (*self.names, "router")
        self.prompts["router"] = self.prompts[None]
        self.refs["router"] = self.shelf.add(folder / "router", "router")
        self.expected["router"] = self.generated(self.model("router"), self.prompts["router"])

    def model(self, name):
        model = super().model(None if name == "router" else name)
        if name == "router":
            for parameter, delta in self._deltas.items():
                model.get_parameter(parameter).data += delta
        return model


@pytest.mark.parametrize("family", MOE)
def test_adapters_of_routers_and_attention_answer_in_one_batch_as_peft_does(
    family, tiny_checkpoints, tmp_path
):
    world = RouterWorld(tiny_checkpoints[family], tmp_path)
    assert world.expected["router"] != world.expected[None]
    answers = Answers(build(world.checkpoint, world.shelf, tmp_path / "cache"))
    bring_all(world, answers)
    assert ask(world, answers) == world.expected
    answers.engine.close()
