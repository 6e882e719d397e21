"""LoRA operators: linear layers y = x·Wᵀ + B(t)·A(t)·x with an adapter for each token t.

`linear`: the linear layer, which every caller uses; `experts`: LoRA of a layer's experts.
`types`: operands; `reference`: the equations in pure torch, which run on the CPU.
Triton kernels: `shrink` (A·x), `expand` (B·v, for v = A·x), `expand_act` (B·v inside a prefill's
SiLU), `gather` (A·x of embeddings), `token_rows` (trained embedding and head rows), `expert_rows`
(experts); `composition`: the ranks of several adapters as one adapter's.
`tiles` and `tuning`: the kernels' work list and launch parameters.
"""
