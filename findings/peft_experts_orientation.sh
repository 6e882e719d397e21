#!/usr/bin/env bash
# PEFT 0.19.1, a patch release, turns the matrices of experts' adapters round.
#
# target_parameters adapts the parameter [experts, out, in] in which transformers 5 keeps a mixture's
# experts. Until PEFT 0.19.0 it is taken as [experts, in, out]: lora_A is [experts · rank, out] and
# lora_B [in, rank · experts], and the delta of each expert is (B A)ᵀ. Since 0.19.1 lora_A is
# [experts · rank, in]. So the shapes of one parameter's adapter depend on the release; if both
# widths are equal, the shapes agree, and the same A and B are another delta.
#
# Seen: A and B of gate_up_proj (16 → 24, 4 experts, rank 3) are [12, 24] and [16, 12] in 0.19.0,
# [12, 16] and [24, 12] in 0.19.1; with 16 → 16, the delta of the same A and B is transposed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 psutil pyyaml
for version in 0.19.0 0.19.1; do
    "$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/$version" peft=="$version"
done
cat > "$folder/run.py" <<'PYTHON'
import sys

import peft
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

version = sys.argv[1]
shapes = []
for width in (12, 8):  # of the experts; gate_up_proj maps 16 to twice as many
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=width,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    base, options = Qwen3MoeForCausalLM(config), {"target_parameters": ["experts.gate_up_proj"]}
    model = peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules=[], **options))
    experts = model.base_model.model.model.layers[0].mlp.experts
    parts = experts.lora_A["default"].weight, experts.lora_B["default"].weight
    shapes.append([list(part.shape) for part in parts])
    torch.manual_seed(0)
    for part in parts:
        part.data.normal_()
    delta = experts.get_delta_weight("default").detach()
torch.save(delta, f"delta-{version}.pt")  # of 16 → 16
print("peft", version, "A and B of gate_up_proj:", shapes[0])
wanted = {"0.19.0": [[12, 24], [16, 12]], "0.19.1": [[12, 16], [24, 12]]}
assert shapes[0] == wanted[version], shapes
PYTHON
cd "$folder"
for version in 0.19.0 0.19.1; do
    PYTHONPATH="$folder/$version" HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore venv/bin/python run.py "$version"
done
venv/bin/python - <<'PYTHON'
import torch

old, new = (torch.load(f"delta-{version}.pt") for version in ("0.19.0", "0.19.1"))
print("the same A and B, largest difference:", float((old - new).abs().max()), "of", float(old.abs().max()))
assert torch.allclose(old.mT, new, atol=1e-5)
assert not torch.allclose(old, new, atol=0.1)
PYTHON
echo "as described"
