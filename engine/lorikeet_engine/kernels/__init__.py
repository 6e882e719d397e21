"""Operators that a GPU spends its time in, each with a path for CPUs.

`lora`: linear layers, the base model's product and the adapters' delta. `gemv`: products of one
    row. `fp8`: products of FP8 weights.
`attention`: back ends of paged attention. `fp8_kv`: format of FP8 keys and values.
`pointwise`: operators between products: norms, rotary embedding, KV writes, SiLU.
`moe`: routing of tokens to experts, and the experts' products. `routed_rows`: the rows between.
`penalties`, `masks`: changes of logits. `sampling`: draws of tokens. `log_softmax`: log
    probabilities of tokens.

In each package, `reference` holds the equations in plain torch, which run on CPUs and which tests
compare with; Triton is imported on CUDA only. The package `sampling` calls `penalties`, `masks`,
`sampling` and `log_softmax`; the package `models` calls the others.
"""
