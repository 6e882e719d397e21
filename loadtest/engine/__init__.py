"""Benchmarks of one engine without a service: they need torch and a GPU, but no Ray and no HTTP.

`throughput`, `decode` and `prefill` measure whole runs and steps; `lora_kernels`, `rank_sums` and
`sampling` parts of a step; `loading` and `long_prompts` what requests cost each other; `step_costs`
how well steps are predicted. `harness` parses their options and writes their JSON, and `plain`
checks tokens before anything is timed.
"""
