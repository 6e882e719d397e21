"""The operators that a GPU spends its time in, each with a path for a CPU.

`lora` is the linear layer, the base model's product and what adapters add to it (`gemv` is that
product for one row, `fp8` that of 8-bit weights), `attention` paged attention's back ends,
`pointwise` what stands between: norms, rotary embedding, SiLU; `fp8_kv` says how both hold keys and
values in 8 bits. `moe` routes tokens to experts and multiplies by these. `penalties` changes
logits, `sampling` draws tokens from them, `log_softmax` says how likely tokens are.
`reference` modules hold an operator's equation in plain torch, which is the CPU's path and what
tests compare with; Triton is imported on CUDA alone. The package `sampling` calls the last three,
`models` all others.
"""
