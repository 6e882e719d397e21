#!/usr/bin/env bash
# PEFT 0.21.2 reads an rsLoRA of a mixture's experts from transformers 4 with another scaling.
#
# With transformers 4 each expert has linears, and a folder has matrices for each. With transformers
# 5 experts are two parameters, and PEFT joins gate_proj and up_proj of such a folder into one LoRA
# of gate_up_proj, of twice the rank. It doubles alpha, too, which keeps alpha / rank; with
# use_rslora the scaling is alpha / √rank, and becomes √2 times what was trained. An alpha_pattern
# for gate_proj and up_proj names nothing any more, and lora_alpha holds.
# One would guess that a folder keeps its meaning, or that what cannot be converted is refused.
#
# Seen: logits of one folder equal the trained ones with transformers 4 and, for a plain LoRA, with
# 5; with use_rslora or an alpha_pattern they differ in 5. No error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0
venv/bin/pip install --quiet transformers==5.24.0 peft==0.21.2 accelerate==1.15.0 requests==2.34.2
venv/bin/pip install --quiet --no-deps --target transformers-4 \
    transformers==4.57.3 huggingface_hub==0.36.2 tokenizers==0.22.2
cat > run.py <<'PYTHON'
import os

import peft
import torch
import transformers

IDS = torch.tensor([[3, 9, 5]])
TARGETS = ["gate_proj", "up_proj", "down_proj"]
CASES = {
    "plain": {},
    "use_rslora": {"use_rslora": True},
    "alpha_pattern": {"alpha_pattern": {"gate_proj": 16, "up_proj": 16}},
}
version = transformers.__version__
if not os.path.isdir("base"):
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=8,
        num_experts=4, num_experts_per_tok=2, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.3,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained("base")
for name, options in CASES.items():
    base = transformers.AutoModelForCausalLM.from_pretrained("base").float()
    if not os.path.isdir(name):
        lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, **options)
        model = peft.get_peft_model(base, lora).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.normal_(std=0.2)
            torch.save(model(IDS).logits, f"{name}.pt")
        model.save_pretrained(name)
        base = transformers.AutoModelForCausalLM.from_pretrained("base").float()
    model = peft.PeftModel.from_pretrained(base, name).eval()
    with torch.no_grad():
        same = torch.allclose(model(IDS).logits, torch.load(f"{name}.pt"), atol=1e-3)
    print(version, name, "as trained" if same else "other")
PYTHON
for path in transformers-4 .; do
    HF_HUB_OFFLINE=1 PYTHONPATH=$path venv/bin/python run.py 2> errors || { cat errors; exit 1; }
done | tee seen
diff seen - <<'SEEN'
4.57.3 plain as trained
4.57.3 use_rslora as trained
4.57.3 alpha_pattern as trained
5.24.0 plain as trained
5.24.0 use_rslora other
5.24.0 alpha_pattern other
SEEN
