#!/usr/bin/env bash
# transformers 5.24.0's vision-language classes leave out what their language model does to logits.
#
# Granite divides its logits by logits_scaling, Gemma 3 with final_logit_softcapping caps them, and
# Cohere 2 multiplies them by logit_scale: in the class for causal models, behind lm_head. The
# classes for images and text have an lm_head of their own. LLaVA-NeXT, LLaVA, Gemma 3's and Aya
# Vision's compute nothing behind it, whatever text_config says; Gemma 4's and PaliGemma's cap. So
# texts get other logits, and at one temperature other samples, than from the language model alone
# of the same weights and config.
# One would guess that a prompt without images is computed as by the language model, since the keys
# are in text_config.
#
# Seen: Granite's logits are 4 times those of its language model with logits_scaling 4; those of
# Gemma 3 exceed the cap of 0.5; Gemma 4's do not; Cohere 2's are 4 times with logit_scale 0.25.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0
venv/bin/pip install --quiet transformers==5.24.0 pillow==13.0.0
cat > run.py <<'PYTHON'
import copy

import torch
import transformers

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": 2, "initializer_range": 0.5, "tie_word_embeddings": True,
}
PATCHES = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
}
CASES = {
    "llava_next": ("granite", {"logits_scaling": 4.0}),
    "gemma3": ("gemma3_text", {"final_logit_softcapping": 0.5}),
    "gemma4": ("gemma4_text", {
        "final_logit_softcapping": 0.5, "hidden_size_per_layer_input": 0, "global_head_dim": 8,
        "layer_types": ["full_attention"],
    }),
    "aya_vision": ("cohere2", {"logit_scale": 0.25}),
}
IDS = torch.tensor([[1, 2, 3]])


@torch.no_grad()
def logits(config, kind, weights=None):
    torch.manual_seed(0)
    model = kind.from_config(config).eval()
    if weights:
        missing = model.load_state_dict(weights, strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}, missing
    return model(input_ids=IDS).logits, model.state_dict()


for wrapper, (text, keys) in CASES.items():
    vision = {"model_type": "gemma4_vision"} if wrapper == "gemma4" else PATCHES
    language = transformers.AutoConfig.for_model(text, **SIZES, **keys)
    settings = {"text_config": language, "vision_config": vision, "tie_word_embeddings": True}
    config = transformers.AutoConfig.for_model(wrapper, **settings)
    whole, weights = logits(config, transformers.AutoModelForImageTextToText)
    parts = {name.partition("language_model.")[2]: weight for name, weight in weights.items()}
    own = {f"model.{part}": weight for part, weight in parts.items() if part}
    alone, _ = logits(copy.deepcopy(config.text_config), transformers.AutoModelForCausalLM, own)
    (key,) = [each for each in keys if "logit" in each]
    if "cap" in key:
        above = ["above" if each.abs().max() > keys[key] else "within" for each in (whole, alone)]
        seen = f"logits {above[0]} the cap, of {text} alone {above[1]}"
    else:
        seen = f"logits {whole.norm() / alone.norm():.2f} times those of {text} alone"
    print(f"{wrapper}, {key} {keys[key]}: {seen}")
PYTHON
HF_HUB_OFFLINE=1 venv/bin/python run.py 2> errors | tee seen || { cat errors; exit 1; }
diff seen - <<'SEEN'
llava_next, logits_scaling 4.0: logits 4.00 times those of granite alone
gemma3, final_logit_softcapping 0.5: logits above the cap, of gemma3_text alone within
gemma4, final_logit_softcapping 0.5: logits within the cap, of gemma4_text alone within
aya_vision, logit_scale 0.25: logits 4.00 times those of cohere2 alone
SEEN
