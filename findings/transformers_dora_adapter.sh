#!/usr/bin/env bash
# transformers 5.24.0 loads a DoRA adapter by its own methods without the trained magnitudes.
#
# AutoModelForCausalLM.from_pretrained(ADAPTER) and model.load_adapter(ADAPTER) read PEFT's folders
# without PeftModel. PEFT's file names a magnitude `q_proj.lora_magnitude_vector`, its module's
# parameter is `lora_magnitude_vector.default.weight`, and transformers does not add `.weight`: the
# magnitudes stay the norms of the base model's rows, as before training. A table in the log names
# them as unexpected and missing; nothing is raised, and A and B are loaded. The methods that would
# go on from there, such as add_adapter and disable_adapters, ask for PEFT 0.22, which PyPI did not
# have on 30 November 2026: they raise ValueError with 0.21.2, the newest.
# One would guess that PEFT and transformers compute one folder alike.
#
# Seen: PeftModel's logits equal the trained ones; transformers' differ with DoRA, and are equal
# for a plain LoRA; disable_adapters raises ValueError.
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
torch.manual_seed(0)
transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)).save_pretrained("base")


def base():
    return transformers.AutoModelForCausalLM.from_pretrained("base").eval()


@torch.no_grad()
def same(model, logits):
    return "equal" if torch.allclose(model.eval()(IDS).logits, logits, atol=1e-4) else "other"


for dora in (False, True):
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=dora)
    model = peft.get_peft_model(base(), lora).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:  # as training would change them
                weight += 0.3 * torch.randn_like(weight)
        logits = model(IDS).logits
    model.save_pretrained("adapter")
    own = base()
    own.load_adapter("adapter")
    auto = transformers.AutoModelForCausalLM.from_pretrained("adapter")
    by_peft = peft.PeftModel.from_pretrained(base(), "adapter")
    print(f"use_dora={dora}: PeftModel", same(by_peft, logits), end=", ")
    print("load_adapter", same(own, logits), "AutoModelForCausalLM", same(auto, logits))
try:
    own.disable_adapters()
except ValueError as error:
    print("disable_adapters:", error)
PYTHON
HF_HUB_OFFLINE=1 venv/bin/python run.py 2> errors | tee seen || { cat errors; exit 1; }
diff seen - <<'SEEN'
use_dora=False: PeftModel equal, load_adapter equal AutoModelForCausalLM equal
use_dora=True: PeftModel equal, load_adapter other AutoModelForCausalLM other
disable_adapters: The version of PEFT you are using is not compatible, please use a version >= 0.22.0
SEEN
