"""One engine and the text around it: prompts in, the client's bytes out. No Ray."""
