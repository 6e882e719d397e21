"""A request as routing sees it."""

from typing import NamedTuple

from lorikeet.routing.choice import Work
from lorikeet.routing.prefixes import Chain
from lorikeet_engine.adapter import AdapterRef


class Ask(NamedTuple):
    """prefixes: of its prompt, see prefix_chain; empty where nothing is known of it."""

    work: Work
    adapter: AdapterRef | None = None
    prefixes: Chain = ()
    tenant: str = ""

    @property
    def digest(self) -> str | None:
        """Of its adapter; None for the base model."""
        return self.adapter.digest if self.adapter else None
