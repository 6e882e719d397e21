"""The base models: decoders of the Llama family, loaded from Hugging Face checkpoints.

`config` reads and checks config.json, `rope_config` what it says of the rotary embedding, whose
angles `rotary` makes. `checkpoint` reads the safetensors, through `staging`'s buffers; linears that
are stored quantised (`weight_format`: `nf4`, `int4`) become floats on the way; `kv_scales`
finds what it says of an FP8 KV cache. `llama` is the
decoder of all families, whose one linear layer adds each token's adapter; `norms` are its norms,
`experts` its MLP where that is a mixture of experts.
`batch` is a forward pass's input. `execution` runs the model; products, attention and LoRA are
`kernels`'.
"""
