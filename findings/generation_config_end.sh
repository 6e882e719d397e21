#!/usr/bin/env bash
# transformers 5.24.0 forgets config.json's eos_token_id if generation_config.json has none.
#
# Without a generation_config.json, generate() ends at config.json's eos_token_id. With one that
# holds, say, a temperature alone, as one writes it to share sampling defaults, the file takes the
# place of all: generation has no end, and each answer has max_new_tokens. Nothing is warned of; the
# model's config still has the id.
# One would guess that a missing key leaves what config.json says.
#
# Seen: 1 token up to the end of sequence without the file and with the id in it, 8 of 8 with a file
# that has a temperature alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0
venv/bin/pip install --quiet transformers==5.24.0
cat > run.py <<'PYTHON'
import json
from pathlib import Path

import torch
import transformers

IDS, END = torch.tensor([[3, 9, 5]]), 7
config = transformers.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
    num_attention_heads=2, eos_token_id=END, pad_token_id=0,
)
transformers.LlamaForCausalLM(config).save_pretrained("model")
file = Path("model/generation_config.json")
file.unlink()
others = [token for token in range(32) if token != END]  # so that the first token is the end
for given in (None, {"eos_token_id": END, "temperature": 0.6}, {"temperature": 0.6}):
    if given:
        file.write_text(json.dumps({**given, "do_sample": True}))
    model = transformers.AutoModelForCausalLM.from_pretrained("model")
    made = model.generate(IDS, suppress_tokens=others, max_new_tokens=8)[0, 3:].tolist()
    print("without the file:" if given is None else f"with {[*given]}:", len(made), "of 8 tokens")
    assert set(made) == {END} and model.config.eos_token_id == END
PYTHON
HF_HUB_OFFLINE=1 venv/bin/python run.py 2> errors | tee seen || { cat errors; exit 1; }
diff seen - <<'SEEN'
without the file: 1 of 8 tokens
with ['eos_token_id', 'temperature']: 1 of 8 tokens
with ['temperature']: 8 of 8 tokens
SEEN
