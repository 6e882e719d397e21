"""Computation of the steps that the scheduler planned; called by engine.py.

At start, assembly builds the model, the adapter tiers and the KV cache (kv_tensors) within a
device's memory (memory_plan), runs every kind of step once so that kernels are compiled (warm_up),
and measures the costs of steps (calibration, step_timer).

For each step, batch_builder lays the chunks end to end, those of one adapter side by side. The
module steps then runs the forward pass and samples the tokens. Steps of up to 2,048 tokens replay
CUDA graphs: a small step one graph (cuda_graphs), a larger step many, with attention launched
between them (piecewise_graphs). A step is launched before the host has read the tokens that the
previous step samples; these pending tokens are copied into its input on the device. Where a grammar
restricts the sampled tokens, grammar_masks waits for the pending tokens while the device computes
the forward pass. prompt_scores adds log probabilities of prompts.

With tensor parallelism, ranks starts a process for each other GPU; leading_runner sends every step
to these processes, and a follower in each runs it.
"""
