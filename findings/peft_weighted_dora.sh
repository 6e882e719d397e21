#!/usr/bin/env bash
# PEFT 0.21.2's add_weighted_adapter drops DoRA's trained magnitudes, and keeps DoRA only by order.
#
# The new adapter gets the weighted A and B of its members. Its config is a copy of the first
# member's: with use_dora, it has magnitudes, but freshly made ones, the norms of the base weight's
# rows, whatever the members trained. If the first member has no DoRA, the sum has none. So a "sum"
# of one DoRA adapter with weight 1 is not that adapter, and the members' order decides which kind
# of adapter the sum is. One would guess that weight 1 copies an adapter, or that PEFT refuses.
#
# Seen: one adapter with doubled magnitudes and its sum of weight 1 differ; two sums of the same
# members differ by the members' order. No error and no warning. ("same" is to 1e-4.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0
venv/bin/pip install --quiet transformers==5.24.0 peft==0.21.2 accelerate==1.15.0
cat > run.py <<'PYTHON'
import warnings

import peft
import torch
import transformers

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
torch.manual_seed(0)
base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS))
lora = {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
model = peft.get_peft_model(base, peft.LoraConfig(use_dora=True, **lora), "dora")
model.add_adapter("plain", peft.LoraConfig(**lora))
linear = model.base_model.model.model.layers[0].self_attn.q_proj
with torch.no_grad():
    for name in ("dora", "plain"):  # as training would change them
        linear.lora_B[name].weight.normal_(std=0.2)
    linear.lora_magnitude_vector["dora"].weight *= 2
x = torch.arange(32.0).view(2, 16) / 32


@torch.inference_mode()
def out(name):
    model.set_adapter(name)
    return linear(x)


def add(name, *members, kind="cat"):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # there is none
        model.add_weighted_adapter(list(members), [1.0] * len(members), name, combination_type=kind)
    return out(name)


for kind in ("cat", "linear"):
    alone = add(f"alone {kind}", "dora", kind=kind)
    print(kind, "of one:", "same" if torch.allclose(alone, out("dora"), atol=1e-4) else "differs")
first, second = add("first", "dora", "plain"), add("second", "plain", "dora")
print("by order:", "same" if torch.allclose(first, second, atol=1e-4) else "differs")
print("magnitudes:", sorted(linear.lora_magnitude_vector))
norms = linear.get_base_layer().weight.norm(dim=1)
kept = linear.lora_magnitude_vector["first"].weight
print("the sum's are the base's norms:", torch.allclose(kept, norms, atol=1e-4))
PYTHON
venv/bin/python run.py 2> errors | tee seen || { cat errors; exit 1; }
diff seen - <<'SEEN'
cat of one: differs
linear of one: differs
by order: differs
magnitudes: ['alone cat', 'alone linear', 'dora', 'first']
the sum's are the base's norms: True
SEEN
