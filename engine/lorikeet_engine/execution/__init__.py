"""Computes the steps that the scheduler planned; called by engine.py.

At start, assembly builds the model, the adapter tiers and the KV cache within a device's memory
(memory_plan), runs all kinds of steps once so that kernels are compiled (warm_up), and measures
what steps cost (calibration). For each step, steps has batch_builder lay chunks end to end, with
those of one adapter as neighbours, runs the forward pass and samples the tokens. Steps of up to
2,048 tokens replay CUDA graphs: a small step one (cuda_graphs), a larger one many, with attention
launched between them (piecewise_graphs). A step is launched before the tokens of the step before
are read; those pending tokens are filled in on the device. Where a grammar restricts what is
sampled (grammar_masks), they are read while the device computes the forward pass.
"""
