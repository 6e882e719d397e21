"""Messages API of Anthropic. A message is the answer to a chat."""
