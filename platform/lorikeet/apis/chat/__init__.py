"""Chat completions of OpenAI's API, with vLLM's fields."""
