"""Where adapters' weights are: remote, on disk, on the host, on the GPU, and how they move."""

from lorikeet_engine.residency.disk import AdapterSource
from lorikeet_engine.residency.residents import Lease
from lorikeet_engine.residency.tiers import Tiers

__all__ = ["AdapterSource", "Lease", "Tiers"]
