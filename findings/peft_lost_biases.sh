#!/usr/bin/env bash
# PEFT 0.7 to 0.20 trains the biases of bias="lora_only" and does not save them.
#
# The option trains the biases of adapted linears. Since PEFT 0.7 their names are
# q_proj.base_layer.bias, and save_pretrained looks for q_proj.bias: the folder holds lora_A and
# lora_B alone, without a warning, and what is loaded again is not what was trained. bias="all" is
# saved. PEFT 0.21 saves both.
#
# Seen: biases in the folder by lora_only: 0 of 1 in 0.20.0, 1 of 1 in 0.21.2; 0.20.0's model gives
# other logits after saving and loading.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==4.57.1 accelerate==1.15.0 psutil pyyaml
for version in 0.20.0 0.21.2; do
    "$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/$version" peft=="$version"
done
cat > "$folder/run.py" <<'PYTHON'
import copy
import sys

import peft
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

version = sys.argv[1]
torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
base, ids = Qwen2ForCausalLM(config).eval(), torch.tensor([[3, 9, 5]])
options = {"r": 2, "target_modules": ["q_proj"], "bias": "lora_only"}
model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**options)).eval()
trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
for name, weight in model.named_parameters():
    if name in trained:
        weight.data += torch.randn_like(weight)
model.save_pretrained(version)
biases = [name for name in load_file(f"{version}/adapter_model.safetensors") if "bias" in name]
again = peft.PeftModel.from_pretrained(base, version).eval()
with torch.no_grad():
    difference = float((model(input_ids=ids).logits - again(input_ids=ids).logits).abs().max())
count = sum("bias" in name for name in trained)
print(f"peft {version}: {len(biases)} of {count} biases saved; loaded again: {difference:.1e}")
assert count == 1, trained
assert len(biases) == {"0.20.0": 0, "0.21.2": 1}[version], biases
assert (difference > 1e-3) == (version == "0.20.0"), difference
PYTHON
cd "$folder"
for version in 0.20.0 0.21.2; do
    PYTHONPATH="$folder/$version" HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore venv/bin/python run.py "$version"
done
echo "as described"
