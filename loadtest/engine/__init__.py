"""Benchmarks of one engine without a service: they need torch and a GPU, but no Ray and no HTTP.

`throughput`, `decode` and `prefill` measure whole runs and steps; `table` runs all three on one
engine. `lora_kernels`, `rank_sums` and `sampling` measure parts of a step; `loading` and
`long_prompts` the effect of requests on each other; `step_costs` the error of predicted steps.
`tune_lora` and `tune_fp8` write launch configs of kernels; `many_gpus` runs programs on four or
eight GPUs. `harness` parses options and writes JSON, and `plain` checks tokens before anything is
timed.
"""
