#!/usr/bin/env bash
# PEFT 0.21.2 reads a folder of 0.18.1 with ensure_weight_tying as another adapter than was trained.
#
# In 0.18.1 the option has no effect on LoRA: of a base model whose head is tied to the embeddings,
# embed_tokens alone gets LoRA. 0.19 and later give the tied head the transposed LoRA, and save both.
# 0.21.2 does that for a folder of 0.18.1, too, which has no weights for the head: the head changes
# though nothing was trained for it, without an error.
#
# Seen: logits of one folder differ between 0.18.1 and 0.21.2, and are equal without the option.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==4.57.1 accelerate==1.15.0 psutil pyyaml
for version in 0.18.1 0.21.2; do
    "$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/$version" peft=="$version"
done
cat > "$folder/run.py" <<'PYTHON'
import copy
import os
import sys

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    tie_word_embeddings=True,
)
base, ids = LlamaForCausalLM(config).eval(), torch.tensor([[3, 9, 5]])
for tying in (False, True):
    name = f"tying-{tying}"
    if not os.path.isdir(name):
        options = {"target_modules": ["embed_tokens"], "ensure_weight_tying": tying}
        model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=2, **options)).eval()
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data.normal_()
        with torch.no_grad():
            torch.save(model(input_ids=ids).logits, f"{name}.pt")
        model.save_pretrained(name)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), name).eval()
    with torch.no_grad():
        difference = (model(input_ids=ids).logits - torch.load(f"{name}.pt")).abs().max().item()
    print(f"peft {peft.__version__}, ensure_weight_tying={tying}: off by {difference:.1e}")
    assert (difference > 1e-2) == (tying and sys.argv[1] == "0.21.2"), difference
PYTHON
cd "$folder"
for version in 0.18.1 0.21.2; do
    PYTHONPATH="$folder/$version" HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore venv/bin/python run.py "$version"
done
echo "as described"
