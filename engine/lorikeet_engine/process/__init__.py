"""Runs an engine in a process of its own, so that its steps share no interpreter with streaming.

client.EngineProcessClient is what a replica holds: it starts the process and calls the engine
through pipes (wire.py). In the process, server answers the calls, steps the engine and sends a
status that has changed; watchdog ends the process if a step hangs.
"""
