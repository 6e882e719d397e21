"""A small base model, the LoRA adapters of three invented tenants, and the tasks they were trained
on.
"""
