"""The LoRA operators: `linear` is the one linear layer, with what each token's adapter adds.

`types` are its operands, `reference` the equation in torch, `shrink`, `expand` and `gather` the
Triton kernels, `expand_act` what a prefill's SiLU expands by itself, `tiles` and `tuning` what
these are launched with.
"""
