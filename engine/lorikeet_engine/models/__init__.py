"""The base models: decoders of the Llama family, loaded from Hugging Face checkpoints.

`config` reads and checks config.json, `checkpoint` the safetensors, through `staging`'s buffers.
`llama` is the decoder of all families, whose one linear layer adds each token's adapter. `batch` is
a forward pass's input. `execution` runs the model; products, attention and LoRA are `kernels`'.
"""
