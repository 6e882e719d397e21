"""The `lorikeet` command: mostly a client of the admin API, which `lorikeet serve` starts.

A command parses its arguments, makes one call, and prints the result.

app.py            joins the commands, and turns failures into exit statuses
admin_client.py   calls the admin API
arguments.py      parses names, sizes and times
output.py         prints tables, JSON and errors
adapters/         register, convert, list, show, promote, rollback, retire, restore, smoke,
                  parity and pins
tenancy/          tenants, keys, usage
catalog/          init, snapshot, log, gc
serve/            serve, stop
service/          status, why, settings, doctor
planning/         capacity, bench
"""

from lorikeet.interrupts import killed_by_sigint

with killed_by_sigint():  # the imports take a while
    from lorikeet.cli.app import app, main

__all__ = ["app", "main"]
