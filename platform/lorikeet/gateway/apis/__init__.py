"""What tenants may send and what they are answered, in OpenAI's words."""
