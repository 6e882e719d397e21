"""The `lorikeet` command, most of which is a client of the admin API.

A command parses its arguments, makes one call and prints. app.py puts the commands together and
turns a failure into one line on stderr and an exit status. admin_client.py asks the admin API,
arguments.py parses names, sizes and times, output.py prints tables, JSON and errors. The commands
lie in folders: adapters/, tenancy/ (tenants, keys, usage), catalog/ (init, snapshot, log, gc),
service/ (status, why, settings, doctor) and planning/ (capacity, bench).
"""

from lorikeet.cli.app import app, main

__all__ = ["app", "main"]
