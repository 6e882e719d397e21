"""LoRA inference engine: token ids in and out, thousands of adapters of one base model.

engine.py is the engine: `submit` a Request (request.py), call `step`, get Outputs. Services use
process/, which runs an engine in a process of its own. scheduling/ plans a step; execution/
computes the step with models/ and kernels/; sampling/ draws its tokens. residency/ moves adapters
between store, disk, host and GPU. adapter_format/ reads and checks adapters' files. telemetry/
defines the engine's status and counters.

Importing this package loads no torch; `lorikeet_engine.engine` does. The package knows no text, no
HTTP, no Ray and no S3.
"""
