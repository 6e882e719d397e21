"""Heads and embeddings: values of prompts, in the shapes of vLLM and OpenAI."""
