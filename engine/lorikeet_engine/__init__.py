"""A LoRA inference engine: token ids in and out, thousands of adapters beside one base model.

Importing this package loads no torch; `lorikeet_engine.engine` does.
"""
