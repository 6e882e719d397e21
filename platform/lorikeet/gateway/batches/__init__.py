"""Batches in a gateway: a scan for batches to run, and the run of each of them.

lines.py reads and checks the input, line_answers.py answers a line as any request is answered,
runner.py runs batches, line_turns.py leaves time to other requests. batch_store.py has the objects
in the store, routes/batches.py the routes.
"""
