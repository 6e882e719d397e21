"""Base models: decoders of the Llama family, loaded from Hugging Face checkpoints.

`config`: config.json, validated; `rotary`: rotary embeddings, their configuration and their angles;
    `kv_groups`: layers that share KV pages.
`checkpoint`: tensors from safetensors files, through `staging`'s buffers; `stored_tensors`: the
    files' headers; `cut`: the part of a tensor that a process keeps; `weight_formats`: quantised
    linears; `kv_scales`: scales of FP8 KV pages.
`llama`: the decoder of all families; `linears`: its linears with LoRA; `norms`: RMS norms; `mlp`:
    dense MLPs; `experts`: mixtures of experts; `batch`: input of a forward pass.
`base_sha256`: hashes of the base model's matrices, for comparison with copies that trainers save.

`execution` runs the model; products, attention and LoRA are operators of `kernels`.
"""
