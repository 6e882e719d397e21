#!/usr/bin/env bash
# PEFT 0.21.2 ignores a parameter that modules_to_save names, without an error or a warning.
#
# A gated delta net of Qwen 3.5 has parameters that belong to no linear: A_log and dt_bias, which
# set how fast it forgets. modules_to_save=["A_log"] is accepted; beside linears that are adapted,
# nothing of A_log is trained or saved, and adapter_config.json still says that it is. A name that
# nothing has is accepted too. One would guess that the parameter is trained and saved, or that the
# name is refused, as target_modules refuses names that match nothing.
#
# Seen: A_log does not require gradients, and the saved file has LoRA tensors alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0
venv/bin/pip install --quiet transformers==5.24.0 peft==0.21.2 accelerate==1.15.0
cat > run.py <<'PYTHON'
import json
import warnings

import peft
import safetensors.torch
import transformers

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "layer_types": ["linear_attention"],
    "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "pad_token_id": None,
}
config = transformers.AutoConfig.for_model("qwen3_5_text", **SIZES)
for saved in ("A_log", "nothing_has_this_name"):
    model = transformers.AutoModelForCausalLM.from_config(config)
    lora = peft.LoraConfig(r=2, target_modules=["out_proj"], modules_to_save=[saved])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = peft.get_peft_model(model, lora)
        adapted.save_pretrained("adapter")
    about = [str(each.message) for each in caught if saved in str(each.message)]
    trained = {name.rpartition(".")[2] for name, each in adapted.named_parameters() if each.requires_grad}
    tensors = safetensors.torch.load_file("adapter/adapter_model.safetensors")
    others = [name for name in tensors if "lora_" not in name]
    said = json.load(open("adapter/adapter_config.json"))["modules_to_save"]
    print(saved, "warnings", len(about), "trained", *sorted(trained), "saved beside LoRA", len(others), "config", *said)
PYTHON
venv/bin/python run.py 2> errors | tee seen || { cat errors; exit 1; }
diff seen - <<'SEEN'
A_log warnings 0 trained weight saved beside LoRA 0 config A_log
nothing_has_this_name warnings 0 trained weight saved beside LoRA 0 config nothing_has_this_name
SEEN
