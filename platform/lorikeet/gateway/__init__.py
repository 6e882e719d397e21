"""The gateway's HTTP API: OpenAI's for tenants, its own for admins."""
