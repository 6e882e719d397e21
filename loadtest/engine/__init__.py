"""Benchmarks of one engine without a service: they need torch and a GPU, but no Ray and no HTTP.

`throughput`, `decode` and `prefill` measure whole runs and steps; `table` runs all three on one
engine. `lora_kernels` measures a part of a step; `loading` and `long_prompts` measure the effect of
requests on each other. `tune_lora` and `tune_fp8` write launch configs of kernels. `harness` parses
options and writes JSON, and `plain` checks tokens before anything is timed.
"""
