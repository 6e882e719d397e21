"""What an engine reports of itself; needs no torch, but for start_up.

status has the messages: EngineStatus and LiveStats (sent when they change), AdapterStatus (on
request), EngineInfo (once). counters has the histograms they are read from. start_up measures the
memory and time of each stage of a start. The platform makes metrics and routing data of them.
"""
