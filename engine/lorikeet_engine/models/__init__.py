"""The base models: decoders of the Llama family, loaded from Hugging Face checkpoints.

`config` reads and checks config.json, `rope_config` what it says of the rotary embedding, whose
angles `rotary` makes; `kv_groups` says which
then share KV pages. `checkpoint` reads the safetensors, through `staging`'s buffers; linears that
are stored quantised (`weight_formats`) become floats on the way or stay FP8, and of each a process
keeps its `cut`; `kv_scales` finds what it says of an FP8 KV cache. `llama` is the decoder of all
families, whose `linears` add each token's adapter; `norms` are its norms, `mlp` its MLPs, `experts`
those of mixtures of experts. `batch` is a forward pass's input. `execution` runs the model;
products, attention and LoRA are `kernels`'.
"""
