#!/usr/bin/env bash
# PEFT 0.21.2 trains Qwen3-Next's routed experts where the shared expert's linears are targeted.
#
# With transformers 5, PEFT rewrites targets of mixtures that it knows under older names: gate_proj
# and up_proj become the parameter gate_up_proj of all experts, and down_proj becomes down_proj. It
# looks at the last part of a name alone, and Qwen3-Next's shared expert has linears of the same
# names. So an expression for mlp.shared_expert.{gate,up,down}_proj adapts no linear of the shared
# expert but the matrices of all routed experts; all-linear leaves the shared expert out; a list
# with gate_proj alone is refused. Qwen 3.5's mixtures, with the same modules, are not rewritten.
# One would guess that an expression selects the modules whose names it matches.
#
# Seen: LoRA on mlp.experts alone for Qwen3-Next, on mlp.shared_expert's three linears for Qwen 3.5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0
venv/bin/pip install --quiet transformers==5.24.0 peft==0.21.2 accelerate==1.15.0
cat > run.py <<'PYTHON'
import peft
import torch
import transformers

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "layer_types": ["full_attention"],
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
    "pad_token_id": None,
}
for family in ("qwen3_next", "qwen3_5_moe_text"):
    for targets in (r".*\.shared_expert\.(gate|up|down)_proj", "all-linear"):
        config = transformers.AutoConfig.for_model(family, **SIZES)
        model = transformers.AutoModelForCausalLM.from_config(config)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets))
        names = {name.partition(".lora_A")[0] for name, _ in adapted.named_parameters() if ".lora_A" in name}
        mlp = {name.partition("layers.0.mlp.")[2].removesuffix(".base_layer") for name in names}
        print(family, "all-linear" if targets == "all-linear" else "expression", *sorted(mlp - {""}))
PYTHON
venv/bin/python run.py 2> errors | tee seen || { cat errors; exit 1; }
diff seen - <<'SEEN'
qwen3_next expression experts
qwen3_next all-linear experts gate shared_expert_gate
qwen3_5_moe_text expression shared_expert.down_proj shared_expert.gate_proj shared_expert.up_proj
qwen3_5_moe_text all-linear shared_expert.down_proj shared_expert.gate_proj shared_expert.up_proj shared_expert_gate
SEEN
