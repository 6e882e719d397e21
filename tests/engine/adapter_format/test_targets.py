"""Cost of resolving a PEFT config's targets."""

import time

import pytest

from lorikeet_engine.adapter_format.expressions import Expressions
from lorikeet_engine.adapter_format.targets import check_targets
from lorikeet_engine.errors import AdapterRejected
from tests.engine.blobs import SHAPE


def test_a_long_list_of_layers_is_not_searched_for_every_module():
    modules = [linear.path(layer) for layer in range(300) for linear in SHAPE.linears]
    config = {
        "target_modules": [linear.name for linear in SHAPE.linears],
        "layers_to_transform": [*range(1_000, 101_000), *range(300)],
    }
    began_s = time.thread_time()
    with Expressions() as run:
        check_targets(config, modules, run)
    assert time.thread_time() - began_s < 1.5  # a search of the list for each takes 4 s


def test_the_number_of_expected_expert_linears_is_limited():
    experts = [f"model.layers.0.mlp.experts.{number}.gate_proj" for number in range(2_000)]
    modules = [*experts, "model.layers.999.mlp.experts.0.gate_proj"]
    with Expressions() as run, pytest.raises(AdapterRejected, match="over 200000 linears"):
        check_targets({"target_modules": ["gate_proj"]}, modules, run)
