"""Samples tokens from logits; called by execution/steps.py.

sampler applies temperature, top_k, top_p and min_p with a seed of each choice's own; before that,
penalties, which keeps each sequence's counted tokens on the device, changes logits by penalties and
biases, and a grammar (grammar.py is the interface, the platform implements it; grammar_worker
compiles them, tenants in turn) restricts the tokens that may follow. logprob_readback reports log
probabilities, the model's own; processed_logprobs those of what a token was drawn from.
What no request asks for costs nothing.
"""
