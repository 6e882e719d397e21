#!/usr/bin/env bash
# transformers 5.5.0 computes another Gemma 4 E2B or E4B without a KV cache than with one.
#
# The last layers of these models have no keys and values of their own, and read those of an earlier
# layer. transformers 5.5.0 found these in the KV cache. Without a cache, as Trainer runs a model
# with gradient checkpointing, such layers used k_proj and v_proj, which they had, and which nothing
# uses with a cache. An adapter that was trained so has been fitted to another model than generation
# runs, and its file has LoRA of keys and values that no layer has. 5.24.0 has no such linears, and
# computes the same with and without a cache.
# One would guess that use_cache changes the time of a computation and not its result.
#
# Seen: the logits of one random model differ by more than 0.1 in 5.5.0, of which PEFT trains k_proj
# in all four layers; in 5.24.0, they are equal, and PEFT finds k_proj in two layers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 peft==0.21.2
cat > run.py <<'PYTHON'
import sys

import peft
import torch
import transformers

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "sliding_window": 16,
    "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.3,
}
IDS = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
torch.manual_seed(0)
config = transformers.AutoConfig.for_model("gemma4_text", **SIZES)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
with torch.no_grad():
    cached, alone = (model(IDS, use_cache=used).logits for used in (True, False))
apart = (cached - alone).abs().max().item()
adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["k_proj"]))
layers = sum(name.endswith("k_proj.lora_A") for name, _ in adapted.named_modules())
print(f"transformers {transformers.__version__}: logits with and without a cache differ by", end=" ")
print(f"{apart:.2g}; PEFT finds k_proj in {layers} of 4 layers")
is_old = transformers.__version__ == sys.argv[1]
assert (apart > 0.1, layers) == ((True, 4) if is_old else (False, 2)), "another behaviour"
assert is_old or apart < 1e-4, apart
PYTHON
for release in 5.5.0 5.24.0; do
    venv/bin/pip install --quiet transformers=="$release"
    venv/bin/python run.py 5.5.0
done
