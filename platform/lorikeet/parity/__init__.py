"""Parity proof: a replica's log-probabilities of tokens compared with those of the trainer.

probes.py        Probes: the trainer's tokens and log-probabilities, as a file or part of a request
figures.py       Gap, Bounds and Parity: how far both differ, the verdict and its cause
peft_probes.py   probes made by a PEFT model, on the trainer's machine

replica/parity.py scores probes and looks for the cause of a difference.
"""
