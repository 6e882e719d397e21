"""Samples tokens from logits; called by execution/steps.py.

sampler applies temperature, top_k, top_p and min_p with a seed of each choice's own; before that,
penalties adds biases and subtracts penalties, and a grammar (grammar.py is the interface, the
platform implements it; grammar_worker compiles them, tenants in turn) restricts the tokens that may
follow. logprobs reports log probabilities.
What no request asks for costs nothing.
"""
