"""A LoRA inference engine: token ids in and out, thousands of adapters of one base model.

engine.py is the engine: `submit` a Request (request.py), call `step`, get Outputs. process/ runs
one in a process of its own and is what services use. A step is planned by scheduling/, computed by
execution/ with models/ and kernels/, and its tokens come from sampling/. residency/ moves adapters
between store, disk, host and GPU; adapter_format/ reads and checks their files. telemetry/ counts.

Importing this package loads no torch; `lorikeet_engine.engine` does. It knows no text, no HTTP, no
Ray and no S3.
"""
