"""`lorikeet doctor`: checks all that a start of the service needs, and says what to change.

checks.py runs the checks one after the other, of which each file here holds some: environment.py
(settings and Ray's variables), versions.py, base_models.py, memory.py, disk.py, gpus.py, ports.py,
system_limits.py, and catalog.py with store.py and adapters.py. A check takes a `PlannedStart`
(planned_start.py: the environment, and the machine as host.py and cuda.py find it) and yields
`Finding`s (finding.py). The command is cli/service/doctor.py.
"""
