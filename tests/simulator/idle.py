"""Check that a simulated replica is idle at the end of a run."""

from lorikeet.simulator.replica import SimulatedReplica


def idle(replica: SimulatedReplica) -> bool:
    """Whether a replica has nothing left to do."""
    arena = replica.arena
    leased = (each.leases > (adapter in arena._pinned) for adapter, each in arena.residents.items())
    queues = (replica.waiting, replica._blocked, replica.queue, replica._ends, replica.decoding)
    return not replica._prompts and not any(queues) and not any(leased)
