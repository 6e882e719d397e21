"""What loads have taken here, hop by hop."""

from dataclasses import dataclass

from lorikeet_engine.costs import LoadCosts

# Of each load in the mean.
_WEIGHT = 0.1
_UNMEASURED = LoadCosts()


@dataclass(slots=True)
class Hop:
    """Exponentially weighted means of the loads over one hop, from one tier to the next.

    seconds: without waiting for a thread or for loads before it. size_bytes: the image's.
    """

    seconds: float = 0.0
    size_bytes: float = 0.0

    def add(self, seconds: float, size_bytes: int) -> None:
        """A load is over."""
        weight = _WEIGHT if self.size_bytes else 1.0
        self.seconds += weight * (seconds - self.seconds)
        self.size_bytes += weight * (size_bytes - self.size_bytes)

    def scaled(self, latency_s: float, bytes_per_s: float) -> tuple[float, float]:
        """A latency and a rate with which a load of the mean size takes the mean time.

        Their proportion is that of those given: a mean alone cannot tell the two apart. As given
        while nothing was measured.
        """
        if not self.size_bytes:
            return latency_s, bytes_per_s
        slower = self.seconds / (latency_s + self.size_bytes / bytes_per_s)
        return latency_s * slower, bytes_per_s / slower


class LoadTimes:
    """The three hops. Told by one thread; any may ask for the costs."""

    def __init__(self) -> None:
        self.downloads, self.reads, self.copies = Hop(), Hop(), Hop()

    def costs(self) -> LoadCosts:
        """As measured here; LoadCosts' own where nothing was."""
        own = _UNMEASURED
        host = self.copies.scaled(own.host_latency_s, own.host_bytes_per_s)
        disk = self.reads.scaled(own.disk_latency_s, own.disk_bytes_per_s)
        remote = self.downloads.scaled(own.remote_latency_s, own.remote_bytes_per_s)
        return LoadCosts(*host, *disk, *remote)
