"""The arenas of several ranks: whatever is placed, evicted and moved, all hold their own images."""

import pickle
from collections import deque

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.parallel.followers import RankCopies
from lorikeet_engine.residency.checksums import added, word_sum
from lorikeet_engine.residency.gpu.arena import ReadsEnd
from lorikeet_engine.residency.gpu.rank_arenas import CopyImage, FollowingArena, LeadingArena
from lorikeet_engine.residency.gpu.slots import SlotPool
from tests.engine.residency.test_slots import LAYERS, layout_of

CPU, ARENA, SLOTS, HOST, WORLD = torch.device("cpu"), 320, 5, 1 << 14, 3
SIZES = st.sampled_from([16, 32, 48, 64])


class Mail:
    """Followers that get their messages, pickled, when `deliver` is called."""

    def __init__(self, followers: list[FollowingArena]) -> None:
        self.followers = followers
        self._queued: list[object] = []
        self._sent = deque[bytes]()
        self._copies: dict[int, RankCopies] = {}

    def queue(self, *messages: object) -> None:
        self._queued += messages

    def send(self, *messages: object) -> None:
        self._sent.append(pickle.dumps([*self._queued, *messages]))
        self._queued = []

    def expect_copy(self, copy: int) -> RankCopies:
        return self._copies.setdefault(copy, RankCopies(len(self.followers)))

    def deliver(self) -> None:
        """Hand over what was sent first, if there is something."""
        if not self._sent:
            return
        for message in pickle.loads(self._sent.popleft()):
            for follower in self.followers:
                if isinstance(message, CopyImage):
                    total, _ = follower.copy_own(message)
                    self._copies[message.copy].add(int(total.wait()))
                else:
                    follower.run(message)

    def deliver_all(self) -> None:
        self.send()
        while self._sent:
            self.deliver()


def weights() -> LoraWeights:
    table = torch.zeros(SLOTS, LAYERS, 7, 3, dtype=torch.int64)
    return LoraWeights(torch.zeros(ARENA), table)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("place"), st.lists(SIZES, min_size=LAYERS, max_size=LAYERS)),
            st.tuples(st.just("evict"), st.integers(0, SLOTS)),
            st.tuples(st.just("deliver"), st.none()),
        ),
        max_size=40,
    )
)
@settings(max_examples=80, deadline=None)
def test_all_arenas_equal_the_images_whatever_was_placed_evicted_and_moved(steps):
    host = torch.arange(1.0, HOST + 1)
    followers = [FollowingArena(weights(), CPU, host, rank) for rank in range(1, WORLD)]
    mail = Mail(followers)
    leader = LeadingArena(weights(), CPU, mail)
    pool, live, copies, begin = SlotPool(ARENA, SLOTS), {}, [], 0
    for what, given_ in steps:
        if what == "place":
            layout = layout_of(*given_)
            if not pool.has_room(layout.elements) or begin + WORLD * layout.elements > HOST:
                continue
            placement = pool.place(layout)
            leader.run(*placement.commands)
            image = host[begin : begin + WORLD * layout.elements]
            begin += len(image)
            live[placement.slot] = image.view(WORLD, -1)
            copies.append((leader.copy(image, placement.pieces), image))
        elif what == "evict" and given_ in live:
            del live[given_]
            leader.run(ReadsEnd(given_), pool.evict(given_))
        elif what == "deliver":
            mail.deliver()
    mail.deliver_all()
    for copy, image in copies:
        copy.event.synchronize()
        assert int(copy.total.wait()) == added([int(word_sum(image))])
    for rank, arena in enumerate([leader, *followers]):
        assert torch.equal(arena.weights.table, leader.weights.table)
        for slot, image in live.items():
            blocks = arena.blocks(pool.placed()[slot].pieces)
            assert torch.equal(torch.cat(blocks), image[rank])


def test_a_copy_is_over_once_it_is_in_all_ranks():
    host = torch.arange(1.0, 129.0)
    mail = Mail([FollowingArena(weights(), CPU, host, 1)])
    leader, pool = LeadingArena(weights(), CPU, mail), SlotPool(ARENA, SLOTS)
    placement = pool.place(layout_of(64, *[0] * (LAYERS - 1)))
    leader.run(*placement.commands)
    copy = leader.copy(host, placement.pieces)
    assert not copy.event.others.is_over
    mail.deliver_all()
    assert copy.event.others.is_over
