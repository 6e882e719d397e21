"""Tool calls in a model's text: the syntax of each family, and parsers of each syntax."""
