#!/usr/bin/env bash
# transformers 5.24.0 saves Gemma 4's sizes under another key than Google's checkpoints have them.
#
# Layers without a window have heads of another size, and another number of key heads. Google's
# config.json says so in global_head_dim and num_global_key_value_heads. transformers reads these
# keys, and save_pretrained writes per_layer_config in their place, with the sizes of each such
# layer. A merged fine-tune is so saved. mlx-lm 0.32.2 reads the two keys alone, takes its defaults
# where they are missing, and cannot load the copy.
# One would guess that a checkpoint that is loaded and saved again keeps the keys of its config, and
# that other readers of the same model still read it.
#
# Seen: the saved config has neither key; transformers computes the same logits from both configs;
# mlx-lm computes them from Google's, and refuses the saved one by the shape of a q_proj.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0
venv/bin/pip install --quiet transformers==5.24.0 "mlx[cpu]==0.32.4" mlx-lm==0.32.2
cat > run.py <<'PYTHON'
import json
import shutil
from pathlib import Path

import mlx.core as mx
import torch
import transformers
from mlx_lm.utils import load_model

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64, "sliding_window": 8,
    "max_position_embeddings": 64, "pad_token_id": 0,
}
GLOBAL = {"global_head_dim": 16, "num_global_key_value_heads": 1}
IDS = [[1, 2, 3, 4, 5]]
torch.manual_seed(0)
config = transformers.AutoConfig.for_model("gemma4_text", **SIZES, **GLOBAL)
transformers.AutoModelForCausalLM.from_config(config).save_pretrained("saved")
saved = json.loads(Path("saved/config.json").read_text())
assert not GLOBAL.keys() & saved.keys()
assert saved.pop("per_layer_config") == {"5": {"head_dim": 16, "num_key_value_heads": 1}}
shutil.copytree("saved", "published")
Path("published/config.json").write_text(json.dumps(saved | GLOBAL))

logits = []
for name in ("published", "saved"):
    model = transformers.AutoModelForCausalLM.from_pretrained(name)
    logits.append(model(torch.tensor(IDS)).logits)
assert torch.equal(*logits)
theirs = torch.tensor(load_model(Path("published"))[0](mx.array(IDS)).tolist())
assert torch.allclose(theirs, logits[0], atol=1e-5)
try:
    load_model(Path("saved"))
except ValueError as error:
    assert "q_proj" in str(error), error
    print(f"transformers 5.24.0 saves {sorted(GLOBAL)} as per_layer_config;", end=" ")
    print(f"mlx-lm 0.32.2 reads the first alone: {error}")
else:
    raise SystemExit("mlx-lm loads what transformers saves")
PYTHON
venv/bin/python run.py
