"""Shapes of base models, by their configs."""

import pytest
import transformers

from lorikeet_engine.adapter_format import FAMILIES, BaseShape, decoder_config
from lorikeet_engine.adapter_format.families import VARIANTS
from lorikeet_engine.errors import ModelError
from tests.engine.tiny_llama import CONFIG

OWN = {
    "gemma4_text": {
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": 1,
    },
    "gemma4_moe_text": {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "moe_intermediate_size": 20,
        "num_experts": 4,
        "top_k_experts": 2,
    },
    "gemma4_e_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "hidden_size_per_layer_input": 12,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    "gemma4_unified_text": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 3,
        "mamba_n_heads": 8,
    },
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "deepseek_v3_whole_queries": {"num_key_value_heads": 4, "q_lora_rank": None},
    "deepseek_v2": {"num_key_value_heads": 4, "q_lora_rank": None, "first_k_dense_replace": 1},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_of_a_base_model_fits_its_linears(family):
    layers = 6 if FAMILIES[family].is_hybrid else 1
    own = OWN.get(family, {})
    types = {variant: name for name, each in VARIANTS.items() for variant in each.values()}
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "head_dim": 12,
        "pad_token_id": None,
        **({"moe_latent_size": 20} if FAMILIES[family].alone else {}),
        **own,
    }
    config = transformers.AutoConfig.for_model(types.get(family, family), **sizes)
    shape = BaseShape.from_config(decoder_config(config.to_dict()))
    model = transformers.AutoModelForCausalLM.from_config(config)
    decoder = model.model.layers
    for linear in FAMILIES[family].outer:
        d_out, d_in = model.get_submodule(linear.module).weight.shape
        assert shape.dims(shape.index(linear.name)) == (d_in, d_out)
    for index, linear in enumerate(shape.linears):
        if linear.of_experts:
            continue
        layer = next(decoder[at] for at in range(layers) if shape.has(at, index))
        name = linear.module
        if hasattr(layer, "block_sparse_moe"):
            name = name.replace("mlp.router", "block_sparse_moe.router")
        module = layer.get_submodule(name)
        d_out, d_in = module.weight.shape
        assert shape.dims(index) == (d_in, d_out), linear.name
    if "expert_gate_up" in shape.groups:
        (gate, up), (down,) = shape.groups["expert_gate_up"], shape.groups["expert_down"]
        (d_in, d_gate), (_, d_up), (width, d_out) = map(shape.dims, (gate, up, down))
        block = getattr(decoder[0], "block_sparse_moe", None) or decoder[-1].mlp
        experts = getattr(block, "experts", None) or decoder[0].experts
        up_dims, down_dims = (d_gate + d_up, d_in), (d_out, width)
        if family == "gpt_oss":
            up_dims, down_dims = up_dims[::-1], down_dims[::-1]
        assert experts.gate_up_proj.shape == (shape.matrices(gate), *up_dims)
        assert experts.down_proj.shape == (shape.matrices(down), *down_dims)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt2"},
        {"hidden_size": 0},
        {"num_attention_heads": None},
        {"num_hidden_layers": "2"},
        {"num_attention_heads": 5, "head_dim": None},
    ],
)
def test_a_base_model_that_is_not_supported_is_a_model_error(change):
    with pytest.raises(ModelError):
        BaseShape.from_config(CONFIG.to_dict() | change)
