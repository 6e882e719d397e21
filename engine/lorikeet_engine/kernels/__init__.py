"""Operators that take most of a GPU's time, each with a CPU path.

`lora`: linear layers: the base model's matrix product plus the delta of each token's adapter.
`gemv`: matrix-vector products, for a batch of one token. `fp8`: products with FP8 weights.
`attention`: back ends of paged attention. `fp8_kv`: format of FP8 keys and values.
`delta_net`: gated delta net, the linear attention of hybrid models.
`mamba`: Mamba 2's scan, the state space layer of hybrid models.
`pointwise`: operators between matrix products: norms, rotary embedding, KV writes, SiLU, gates.
`moe`: routing of tokens to experts, and the experts' products. `routed_rows`: the tokens of a
    mixture of experts, sorted by expert: an operand of both `moe` and `lora`.
`penalties`, `masks`: changes of logits. `sampling`: draws of tokens. `log_softmax`: log
    probabilities of tokens.

A package's functions are the operators' definitions in pure torch, which run on CPUs and which
tests compare the kernels with. `by_device` replaces them on CUDA by the functions of the same names
in the package's module `fused`, and imports Triton on CUDA only. In `lora`, `reference` has them.
"""
