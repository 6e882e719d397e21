"""Status, counters and start-up measurements of an engine. Only start_up needs torch.

status: messages EngineStatus and LiveStats (sent when they change), AdapterStatus (on request) and
    EngineInfo (once). The platform derives metrics and routing data from them.
counters: histograms and counters that fill the messages.
start_up: memory and time of each stage of a start.
"""
