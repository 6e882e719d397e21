"""Completions of OpenAI's API, with vLLM's fields. Answers: chat/answer.py."""
