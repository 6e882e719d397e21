"""One Fleet for each engine deployment, shared by this process's router and gateway.

It is a module of its own because Serve pickles the router's class by value, so globals beside that
class would be others than the gateway's. What it imports is shared.
"""

from threading import Lock

from lorikeet.routing.fleet import Fleet

_lock = Lock()
_fleets: dict[tuple[str, str], Fleet] = {}


def fleet_of(application: str, deployment: str) -> Fleet:
    """The one Fleet of a deployment in this process; any thread may ask."""
    name = (application, deployment)
    with _lock:
        if name not in _fleets:
            _fleets[name] = Fleet()
        return _fleets[name]
