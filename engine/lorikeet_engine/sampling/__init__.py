"""Samples tokens from logits; called by execution/sampling_step.py.

sampler applies temperature, top_k and top_p with a seed of each choice's own; before that,
penalties adds biases and subtracts penalties, and a grammar (grammar.py is the interface, the
platform implements it) restricts the tokens that may follow. logprobs reports log probabilities.
What no request asks for costs nothing.
"""
