"""An engine in a process of its own: the client that starts it, its server, the pipe between."""
