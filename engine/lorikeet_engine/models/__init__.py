"""The base models: decoders of the Llama family, loaded from Hugging Face checkpoints."""

from lorikeet_engine.models.config import ModelConfig
from lorikeet_engine.models.llama import LlamaModel, load_model, rehearse_load

__all__ = ["LlamaModel", "ModelConfig", "load_model", "rehearse_load"]
