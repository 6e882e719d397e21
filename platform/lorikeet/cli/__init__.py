"""The `lorikeet` command: a client of the admin API, and `init`, which makes a catalog."""

from lorikeet.cli.app import app, main

__all__ = ["app", "main"]
