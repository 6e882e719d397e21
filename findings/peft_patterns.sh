#!/usr/bin/env bash
# PEFT's rank_pattern silently switches off alpha_pattern until 0.13.2.
#
# Until 0.13.2 one key is looked up in both patterns: the first key of either that matches a module.
# If rank_pattern's key matches first, alpha_pattern has no such key, and the module keeps
# lora_alpha. Since 0.14.0 both are looked up independently. Until 0.14.0 a key is not grouped in
# PEFT's expression, so of "q_proj|v_proj" only q_proj is found. Ranks show in the weights, alphas do
# not: the same folder gives other answers in each of these releases, without a warning.
#
# Seen: scalings of v_proj by the first config 4, 2.5, 2.5; by the second config 2, 2, 1.25.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==4.45.2 accelerate==1.15.0 psutil pyyaml
for version in 0.13.2 0.14.0 0.15.2; do
    "$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/$version" peft=="$version"
done
cat > "$folder/run.py" <<'PYTHON'
import sys

import peft
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
)
found = []
for patterns in (
    {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.0.self_attn.v_proj": 5}},
    {"alpha_pattern": {"q_proj|v_proj": 5}},
):
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    model = peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(**options, **patterns))
    found.append(model.base_model.model.model.layers[0].self_attn.v_proj.scaling["default"])
print("peft", peft.__version__, "scalings of v_proj:", found)
wanted = {"0.13.2": [4, 2], "0.14.0": [2.5, 2], "0.15.2": [2.5, 1.25]}
assert found == wanted[sys.argv[1]], found
PYTHON
cd "$folder"
for version in 0.13.2 0.14.0 0.15.2; do
    PYTHONPATH="$folder/$version" HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore venv/bin/python run.py "$version"
done
echo "as described"
