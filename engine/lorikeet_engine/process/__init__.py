"""Runs an engine in a process of its own, so that its steps share no interpreter with streaming.

client.EngineProcessClient is what a replica holds: it starts the process and calls the engine
through pipes (wire.py). In the process, server answers the calls and steps the engine, watchdog
ends the process if a step hangs, and status_reporter sends a status that has changed.
"""
