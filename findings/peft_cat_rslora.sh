#!/usr/bin/env bash
# PEFT 0.21.2 multiplies the sum of add_weighted_adapter("cat") by √rank if the first has rsLoRA.
#
# The sum's matrices already have each adapter's weight and scaling inside, so its own scaling must
# be 1: PEFT sets lora_alpha = r for it. But it copies the rest of the first adapter's config, and
# with use_rslora the scaling is lora_alpha / √r = √r, for the sum's r, which all ranks add up to.
# With the same adapters in another order the sum is right. One would guess that the order of the
# terms of a sum does not matter.
#
# Seen: the sum of ranks 4 and 5 is 3 times what its adapters add, if the first has rsLoRA.
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
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
x = torch.arange(32.0).view(2, 16) / 32
for first_rs in (False, True):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **HEADS)
    lora = {"target_modules": ["q_proj"], "init_lora_weights": False}
    one = peft.LoraConfig(r=4, lora_alpha=8, use_rslora=first_rs, **lora)
    two = peft.LoraConfig(r=5, lora_alpha=5, **lora)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), one, "one")
    model.add_adapter("two", two)
    linear = model.base_model.model.model.layers[0].self_attn.q_proj
    def delta(name):
        model.set_adapter(name)
        return linear(x) - linear.base_layer(x)
    wanted = 0.5 * delta("one") + 1.5 * delta("two")
    model.add_weighted_adapter(["one", "two"], [0.5, 1.5], "sum", combination_type="cat")
    times = (delta("sum") / wanted).mean().item()
    print("first with rsLoRA" if first_rs else "first without", f"{times:.3f}", linear.scaling["sum"])
PYTHON
venv/bin/python run.py 2> errors | tee seen || { cat errors; exit 1; }
diff seen - <<'SEEN'
first without 1.000 1.0
first with rsLoRA 3.000 3.0
SEEN
