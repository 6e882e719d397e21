"""Sampling of tokens from logits, as execution/steps.py calls it.

Features that a step does not use cost nothing.

`sampler`: temperature, top_k, top_p and min_p, with a seed for each choice; `draws`: its operands.
`penalties`: penalties and logit biases; each sequence's token counts stay on the device.
`grammar`: interface of grammars, which the platform implements. `grammar_worker`: thread that
    compiles grammars, taking those of each tenant in turn.
`logprob_readback`: log probabilities of the model's own distribution, and their copy to the host.
`processed_logprobs`: log probabilities of the distribution that tokens are drawn from.
"""
