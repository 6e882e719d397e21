"""Registry of this process's Fleets, one per engine deployment, shared by router and gateway.

A module of its own because Serve pickles the router's class by value: globals in the router's
module would be copies, whereas modules that it imports are shared.
"""

from threading import Lock

from lorikeet.routing.fleet import Fleet

_lock = Lock()
_fleets: dict[tuple[str, str], Fleet] = {}


def fleet_of(application: str, deployment: str) -> Fleet:
    """Return this process's one Fleet (known state of the replicas) of a deployment.

    Created on first use. Thread-safe.
    """
    name = (application, deployment)
    with _lock:
        if name not in _fleets:
            _fleets[name] = Fleet()
        return _fleets[name]
