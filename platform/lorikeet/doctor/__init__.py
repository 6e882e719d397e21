"""Looks at everything that a start needs, before it is started, and says what to change."""
