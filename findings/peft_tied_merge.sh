#!/usr/bin/env bash
# PEFT 0.21.2's merge adds the LoRA of tied embeddings twice.
#
# ensure_weight_tying gives a tied head the embeddings' LoRA, transposed, and both layers share
# their matrices. Their base weight is one tensor, too: merge_and_unload adds the embeddings' delta
# to it, then the head's, which is the same. merge_adapter and safe_merge do so as well. PEFT warns
# that tied layers "can lead to complications", with the option as without it.
# One would guess that the option, whose purpose is to keep both layers equal, makes the merge right:
# with it, one merged tensor could hold both.
#
# Seen: the merged weight differs from the base's by twice the delta; logits of the merged model
# differ from the adapter's, and equal them if the head is not tied.
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

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.3}
IDS = torch.tensor([[3, 9, 5]])
for tied, safe in ((False, False), (True, False), (True, True)):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied)
    base = transformers.LlamaForCausalLM(config).eval()
    before = base.model.embed_tokens.weight.detach().clone()
    options = {"target_modules": ["embed_tokens"], "ensure_weight_tying": tied}
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=4, **options)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.normal_(std=0.3)
        logits = model(IDS).logits
        delta = model.base_model.model.model.embed_tokens.get_delta_weight("default")
        merged = model.merge_and_unload(safe_merge=safe)
        times = ((merged.model.embed_tokens.weight - before) / delta).median().item()
        same = torch.allclose(merged(IDS).logits, logits, atol=1e-3)
    how = f"tied={tied}, safe_merge={safe}"
    print(f"{how}: {times:.2f} times the delta; logits", "equal" if same else "other")
PYTHON
HF_HUB_OFFLINE=1 venv/bin/python run.py 2> errors | tee seen || { cat errors; exit 1; }
diff seen - <<'SEEN'
tied=False, safe_merge=False: 1.00 times the delta; logits equal
tied=True, safe_merge=False: 2.00 times the delta; logits other
tied=True, safe_merge=True: 2.00 times the delta; logits other
SEEN
