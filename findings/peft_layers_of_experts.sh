#!/usr/bin/env bash
# PEFT before 0.20 takes an expert's number for the layer's in layers_to_transform.
#
# Without layers_pattern, a module's layer is the number behind any name in it. Until 0.19.1 it is
# the last such number: of layers.2.mlp.experts.1.gate_proj, which mixtures have with transformers 4,
# it is 1. So layers_to_transform=[1] adapts q_proj of layer 1, and expert 1 of every layer. Since
# 0.20.0 it is the first number, and all experts of layer 1 are adapted; layers_pattern="layers"
# selects these in each release.
# One would guess that the option selects layers, for experts as for attention.
#
# Seen: 0.19.1 adapts expert 1 of layers 0, 1 and 2; 0.20.0 the four experts of layer 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0
venv/bin/pip install --quiet transformers==4.57.3 accelerate==1.15.0 psutil pyyaml
for release in 0.19.1 0.20.0; do
    venv/bin/pip install --quiet --no-deps --target "peft-$release" "peft==$release"
done
cat > run.py <<'PYTHON'
import re

import peft
import transformers

config = transformers.Qwen3MoeConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_experts=4,
    num_experts_per_tok=2, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
    head_dim=8,
)
for pattern in (None, "layers"):
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj", "gate_proj"], layers_to_transform=[1], layers_pattern=pattern
    )
    model = peft.get_peft_model(transformers.Qwen3MoeForCausalLM(config), lora)
    names = " ".join(name for name, _ in model.named_parameters() if "lora_A" in name)
    found = re.findall(r"layers\.(\d)\.mlp\.experts\.(\d)", names)
    print(peft.__version__, "layers_pattern", pattern, "layers/experts:", *map("/".join, found))
PYTHON
for release in 0.19.1 0.20.0; do
    PYTHONPATH="peft-$release" venv/bin/python run.py 2> errors || { cat errors; exit 1; }
done | tee seen
diff seen - <<'SEEN'
0.19.1 layers_pattern None layers/experts: 0/1 1/1 2/1
0.19.1 layers_pattern layers layers/experts: 1/0 1/1 1/2 1/3
0.20.0 layers_pattern None layers/experts: 1/0 1/1 1/2 1/3
0.20.0 layers_pattern layers layers/experts: 1/0 1/1 1/2 1/3
SEEN
