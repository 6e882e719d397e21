#!/usr/bin/env bash
# PEFT takes the biases of a complete lora_bias adapter for shards that were not gathered.
#
# With lora_bias=True, lora_B is a linear with a bias, a vector. save_pretrained checks that every
# lora_A and lora_B is a matrix, and warns of the bias: "LoRA tensor(s) have invalid shape ...
# indicates that DeepSpeed ZeRO-3 / FSDP shards were not gathered", so that they are incomplete.
# The file is complete: loaded again, without a warning, the adapter computes the same.
# One would guess that nothing is warned of, as nothing is wrong.
#
# Seen with peft 0.21.2: one warning for saving, none for loading, equal outputs; without lora_bias
# no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2 accelerate==1.15.0
cat > run.py <<'PYTHON'
import copy
import warnings

import peft
import torch
import transformers

config = transformers.Qwen2Config(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, vocab_size=64, pad_token_id=0,
)
base = transformers.Qwen2ForCausalLM(config).eval()


def alarms(caught):
    return sum("shards were not gathered" in str(each.message) for each in caught)


for lora_bias in (False, True):
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_bias=lora_bias)
    model = peft.get_peft_model(copy.deepcopy(base), lora)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.normal_()
    folder = f"saved-{lora_bias}"
    with warnings.catch_warnings(record=True) as saving:
        warnings.simplefilter("always")
        model.save_pretrained(folder)
    with warnings.catch_warnings(record=True) as loading:
        warnings.simplefilter("always")
        again = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder)
    ids = torch.arange(9)[None]
    same = torch.equal(model.eval()(ids).logits, again.eval()(ids).logits)
    print(f"lora_bias={lora_bias}: {alarms(saving)} {alarms(loading)} same={same}")
PYTHON
venv/bin/python run.py 2> errors | tee seen || { cat errors; exit 1; }
diff seen - <<'SEEN'
lora_bias=False: 0 0 same=True
lora_bias=True: 1 0 same=True
SEEN
