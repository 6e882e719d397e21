#!/usr/bin/env bash
# PEFT 0.17.1 and 0.18.1 read one adapter of Gemma 3's embeddings and give different logits.
#
# Gemma 3's embedding module multiplies by √hidden_size. LoRA on embed_tokens is added behind that
# product until PEFT 0.17, and multiplied too since 0.18: an adapter that was trained by the older
# one is √hidden_size times too strong in the newer one, without an error or a warning. Tokens
# trained by trainable_token_indices are worse: until 0.17 the whole module's output is unscaled, of
# all tokens, so no newer PEFT can compute what was trained. The folder of 0.17 has no peft_version.
#
# Seen: LoRA's part of the embeddings grows by 4 = √16; with trained tokens, an untouched token's
# embedding is a fourth of the base model's in 0.17.1 and equal to it in 0.18.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==4.57.1 accelerate==1.15.0 psutil pyyaml
for version in 0.17.1 0.18.1; do
    "$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/$version" peft=="$version"
done
cat > "$folder/run.py" <<'PYTHON'
import os
import sys

import peft
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

torch.manual_seed(0)
config = Gemma3TextConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)
base = Gemma3ForCausalLM(config).float().eval()
ids = torch.tensor([[3, 9]])
plain = base.model.embed_tokens(ids).detach()
for name, options in {
    "lora": {"target_modules": ["embed_tokens"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3]},
}.items():
    if not os.path.isdir(name):
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=2, **options))
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data.normal_()
        model.save_pretrained(name)
        base = model.unload()
    model = peft.PeftModel.from_pretrained(base, name)
    found = model.base_model.model.model.embed_tokens(ids).detach()
    torch.save((plain, found), f"{name}-{sys.argv[1]}.pt")
    base = model.unload()
PYTHON
cd "$folder"
for version in 0.17.1 0.18.1; do
    PYTHONPATH="$folder/$version" HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore venv/bin/python run.py "$version"
done
venv/bin/python - <<'PYTHON'
import torch

parts, others = {}, {}
for version in ("0.17.1", "0.18.1"):
    plain, found = torch.load(f"lora-{version}.pt")
    parts[version] = found - plain
    plain, found = torch.load(f"tokens-{version}.pt")
    others[version] = (found[0, 1] / plain[0, 1]).mean().item()  # token 9 is not trained
ratio = (parts["0.18.1"] / parts["0.17.1"]).mean().item()
print(f"LoRA's part, 0.18.1 to 0.17.1: {ratio:.3f}; an untouched token to the base's: {others}")
assert abs(ratio - 4) < 1e-3, ratio
assert abs(others["0.17.1"] - 0.25) < 1e-3, others
assert abs(others["0.18.1"] - 1) < 1e-3, others
PYTHON
echo "as described"
