"""`lorikeet doctor`: checks everything that a start of the service needs, and proposes fixes.

checks.py runs the checks one after the other. Each check takes a `PlannedStart` (planned_start.py:
the environment, and the machine as machine.py finds it) and yields `Finding`s (finding.py).
refusals.py runs the checks whose problems no start survives; every start begins with them.

environment.py   settings and Ray's variables
software.py      Python, packages, and the compilers of kernels
base_models.py   folders of base models
memory.py        memory of GPUs and of the host
gpus.py          GPUs and their driver
system.py        the disk cache's folder, ports, shared memory, open files
catalog.py       the catalog, its admin keys and its adapters
store.py         the object store below the catalog

The command is cli/service/doctor.py.
"""
