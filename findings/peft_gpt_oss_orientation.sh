#!/usr/bin/env bash
# PEFT saves LoRA of a parameter of gpt-oss's experts in one of two orientations, by releases.
#
# gpt-oss stores experts as [experts, in, out], and PEFT's ParamWrapper takes a parameter's inputs
# from its shape. 0.18.1 takes [experts, in, out] always. 0.19.1 takes [experts, out, in] unless
# the module has is_transposed, which transformers 5 sets for gpt-oss and transformers 4 does not;
# 0.19.0 has the condition the other way round. So the same training gives lora_A of `in` with one
# pair of releases and of `out` with another. gpt-oss's down_proj is square (2880 to 2880): there
# the file does not show which, and a newer release loads the other's file without an error.
# One would guess that a file's meaning depends on the file, or on peft_version, which it names.
#
# Seen: lora_A of down_proj [experts · rank, in] with 0.18.1 and both, 0.19.0 and transformers 4,
# 0.19.1 and 0.21.2 with transformers 5; [experts · rank, out] in the other cases.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0
venv/bin/pip install --quiet transformers==5.24.0 peft==0.21.2 accelerate==1.15.0 requests==2.32.5
for release in 0.18.1 0.19.0 0.19.1 0.21.2; do
    venv/bin/pip install --quiet --no-deps --target "peft-$release" "peft==$release"
done
venv/bin/pip install --quiet --no-deps --target transformers-4 \
    transformers==4.57.3 huggingface_hub==0.36.2 tokenizers==0.22.2
mkdir transformers-5
cat > run.py <<'PYTHON'
import peft
import transformers

config = transformers.GptOssConfig(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, num_local_experts=3, num_experts_per_tok=2, vocab_size=64,
    layer_types=["full_attention"], pad_token_id=0,
)
model = transformers.GptOssForCausalLM(config)
lora = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
weights = dict(peft.get_peft_model(model, lora).named_parameters())
(a,) = (w for name, w in weights.items() if "experts.lora_A" in name)
side = {24: "in", 16: "out"}[a.shape[1]]
print(peft.__version__, transformers.__version__.split(".")[0], side)
PYTHON
for release in 0.18.1 0.19.0 0.19.1 0.21.2; do
    for major in 4 5; do
        PYTHONPATH="peft-$release:transformers-$major" venv/bin/python run.py 2> errors ||
            { cat errors; exit 1; }
    done
done | tee seen
diff seen - <<'SEEN'
0.18.1 4 in
0.18.1 5 in
0.19.0 4 in
0.19.0 5 out
0.19.1 4 out
0.19.1 5 in
0.21.2 4 out
0.21.2 5 in
SEEN
