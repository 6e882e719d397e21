"""Engine in a process of its own, so that its steps share no Python interpreter with other work.

client.EngineProcessClient starts the process for a replica and calls the engine through pipes
(wire.py). In the process, server answers the calls, steps the engine and sends each changed status;
watchdog ends the process if a step hangs.
"""
