"""How long loads have taken here, hop by hop: a hop is from one tier to the next nearer one."""

from dataclasses import dataclass

from lorikeet_engine.costs import LoadCosts

# The weight of each load in the mean.
_WEIGHT = 0.1
_UNMEASURED = LoadCosts()


@dataclass(slots=True)
class Hop:
    """Exponentially weighted means of the loads over one hop.

    seconds: without waiting for a thread or for loads before it. size_bytes: the image's.
    """

    seconds: float = 0.0
    size_bytes: float = 0.0

    def add(self, seconds: float, size_bytes: int) -> None:
        """Take a finished load into the means."""
        weight = _WEIGHT if self.size_bytes else 1.0
        self.seconds += weight * (seconds - self.seconds)
        self.size_bytes += weight * (size_bytes - self.size_bytes)

    def scaled(self, latency_s: float, bytes_per_s: float) -> tuple[float, float]:
        """A latency and a rate with which a load of the mean size takes the mean time.

        In the proportion of those given: a mean alone cannot tell the two apart. Those given while
        nothing was measured.
        """
        if not self.size_bytes:
            return latency_s, bytes_per_s
        slower = self.seconds / (latency_s + self.size_bytes / bytes_per_s)
        return latency_s * slower, bytes_per_s / slower


class LoadTimes:
    """The three hops' means. Written by one thread; any may ask for the costs."""

    def __init__(self) -> None:
        self.downloads, self.reads, self.copies = Hop(), Hop(), Hop()

    def costs(self) -> LoadCosts:
        """What loads take, as measured here; LoadCosts' defaults where nothing was."""
        default = _UNMEASURED
        host = self.copies.scaled(default.host_latency_s, default.host_bytes_per_s)
        disk = self.reads.scaled(default.disk_latency_s, default.disk_bytes_per_s)
        remote = self.downloads.scaled(default.remote_latency_s, default.remote_bytes_per_s)
        return LoadCosts(*host, *disk, *remote)
