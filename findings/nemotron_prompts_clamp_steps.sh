#!/usr/bin/env bash
# transformers 5.24.0 computes Nemotron-H's prompts and its decodes by different Mamba 2 layers.
#
# A Mamba 2 layer turns an input dt into the time step softplus(dt + dt_bias), within the bounds of
# config.json's time_step_limit (0 and infinity in NVIDIA's checkpoints). transformers reads no
# time_step_limit for `nemotron_h`: a prompt's steps are at least time_step_min (0.001), a range of
# the first weights in training; a decode's steps have no bounds. So a token with a smaller step
# gets other logits as part of a prompt than after it, and the cache that a prompt leaves differs
# from that of the same tokens one by one. Granite 4 (`granitemoehybrid`) reads time_step_limit in
# prompts, and not in decodes either.
# One would guess that a prompt computes what its tokens compute one by one, and that the key of
# the limits sets them.
#
# Seen: a prompt's logits equal its tokens' one by one with steps above time_step_min, and differ
# with smaller ones, unless time_step_min is next to 0; time_step_limit changes no logits of
# nemotron_h, and makes those of granitemoehybrid's prompts differ from its tokens' one by one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0
venv/bin/pip install --quiet transformers==5.24.0
cat > run.py <<'PYTHON'
import torch
import transformers

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 16, "initializer_range": 0.3, "pad_token_id": None,
}
FAMILIES = {
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention"], "head_dim": 8,
        "mamba_num_heads": 2, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2,
        "mamba_n_heads": 4, "mamba_d_state": 8, "num_local_experts": 0,
        "shared_intermediate_size": 16,
    },
}
IDS = torch.arange(40)[None] % 64


@torch.inference_mode()
def logits(family, dt_bias, **changes):
    """Logits of a prompt, and of its tokens one by one."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES, **FAMILIES[family], **changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("dt_bias"):
            weight.fill_(dt_bias)
    cache, single = transformers.DynamicCache(config=model.config), []
    for token in IDS.split(1, dim=1):
        single.append(model(token, cache=cache, use_cache=True).logits)
    return model(IDS).logits, torch.cat(single, 1)


def same(one, other):
    return "equal" if torch.allclose(one, other, rtol=0, atol=1e-4) else "other"


print("nemotron_h: prompt and decodes", same(*logits("nemotron_h", 0.0)))
print("nemotron_h, steps below time_step_min: prompt and decodes", same(*logits("nemotron_h", -12.0)))
least = logits("nemotron_h", -12.0, time_step_min=1e-30)
print("nemotron_h, as small steps, time_step_min 1e-30: prompt and decodes", same(*least))
limits = {"time_step_limit": (0.9, 1.0)}
one, other = (logits("nemotron_h", 0.0, **each)[0] for each in ({}, limits))
print("nemotron_h, with and without time_step_limit: prompts", same(one, other))
print("granitemoehybrid: prompt and decodes", same(*logits("granitemoehybrid", 0.0)))
limited = logits("granitemoehybrid", 0.0, **limits)
print("granitemoehybrid, time_step_limit: prompt and decodes", same(*limited))
PYTHON
venv/bin/python run.py 2> errors | tee seen || { cat errors; exit 1; }
diff seen - <<'SEEN'
nemotron_h: prompt and decodes equal
nemotron_h, steps below time_step_min: prompt and decodes other
nemotron_h, as small steps, time_step_min 1e-30: prompt and decodes equal
nemotron_h, with and without time_step_limit: prompts equal
granitemoehybrid: prompt and decodes equal
granitemoehybrid, time_step_limit: prompt and decodes other
SEEN
