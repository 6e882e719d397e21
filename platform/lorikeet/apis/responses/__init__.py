"""Responses API of OpenAI. A response is the answer to a chat."""
