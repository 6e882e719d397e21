"""A small base model and the LoRA adapters of three invented tenants, with what trained them."""
