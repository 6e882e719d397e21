"""Arenas of several ranks: all hold their own images after any operations."""

import pickle
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet_engine.adapter_format import AdapterLimits, BaseShape, read_spec
from lorikeet_engine.errors import DeviceLost
from lorikeet_engine.kernels.lora.types import LoraWeights
from lorikeet_engine.parallel.followers import RankCopies
from lorikeet_engine.residency.blob_packing import pack
from lorikeet_engine.residency.checksums import added, word_sum
from lorikeet_engine.residency.gpu.arena import DeviceArena, Piece, ReadsEnd, WriteRow
from lorikeet_engine.residency.gpu.image_copies import ImageCopy
from lorikeet_engine.residency.gpu.rank_arenas import CopyImage, FollowingArena, LeadingArena
from lorikeet_engine.residency.gpu.slots import SlotPool
from lorikeet_engine.residency.packed_image import PackedLayout
from tests.engine.blobs import Shelf
from tests.engine.residency.test_slots import LAYERS, layout_of

CPU, ARENA, SLOTS, HOST, WORLD = torch.device("cpu"), 640, 5, 1 << 14, 3
SIZES = st.sampled_from([16, 32, 48, 64])
MOE = BaseShape(
    "qwen3_moe",
    layers=2,
    hidden=16,
    intermediate=12,
    heads=4,
    kv_heads=2,
    head_dim=4,
    vocabulary=40,
    experts=3,
)
# Adapters' ranks by (layer, linear): all linears, experts', one of these, attention and router.
OF_EXPERTS = (
    {(layer, linear): 4 for layer in range(2) for linear in range(8)},
    {(layer, linear): 2 for layer in range(2) for linear in (5, 6, 7)},
    {(1, 7): 5},
    {(0, 0): 3, (1, 3): 2, (0, 4): 6, (1, 4): 6, (1, 1): 1},
)


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
        """Deliver the oldest message, if any."""
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


class Arenas:
    """All ranks' arenas, and the leader's slot pool."""

    def __init__(
        self, world: int, host: torch.Tensor, elements: int, rows: tuple[int, int], slots: int
    ) -> None:
        def weights() -> LoraWeights:
            table = torch.zeros(slots, *rows, 3, dtype=torch.int64)
            return LoraWeights(torch.zeros(elements), table)

        self.followers = [FollowingArena(weights(), CPU, host, rank) for rank in range(1, world)]
        self.mail = Mail(self.followers)
        self.leader = LeadingArena(weights(), CPU, self.mail)
        self.pool = SlotPool(elements, slots)
        self._copies: list[tuple[ImageCopy, torch.Tensor]] = []

    def place(self, layout: PackedLayout, image: torch.Tensor) -> int:
        placement = self.pool.place(layout)
        self.leader.run(*placement.commands)
        self._copies.append((self.leader.copy(image, placement.pieces), image))
        return placement.slot

    def evict(self, slot: int) -> None:
        self.leader.run(ReadsEnd(slot), self.pool.free(slot))

    def settle(self) -> list[DeviceArena]:
        """Deliver all messages and finish all copies; return the arenas by rank."""
        self.mail.deliver_all()
        for copy, image in self._copies:
            copy.event.synchronize()
            assert int(copy.total.wait()) == added([int(word_sum(image))])
        arenas = [self.leader, *self.followers]
        for arena in arenas:
            assert torch.equal(arena.weights.table, self.leader.weights.table)
        return arenas


def steps_of(place: st.SearchStrategy) -> st.SearchStrategy:
    """Random sequences of operations.

    place: draws the arguments of a placement.
    """
    return st.lists(
        st.one_of(
            st.tuples(st.just("place"), place),
            st.tuples(st.just("evict"), st.integers(0, SLOTS - 1)),
            st.tuples(st.just("deliver"), st.none()),
        ),
        min_size=24,  # shorter ones leave no holes that images must move for
        max_size=40,
    )


@given(steps_of(st.lists(SIZES, min_size=LAYERS, max_size=LAYERS)))
@settings(max_examples=80, deadline=None)
def test_all_arenas_hold_their_images_after_any_placement_eviction_and_move(steps):
    host = torch.arange(1.0, HOST + 1)
    arenas, live, begin = Arenas(WORLD, host, ARENA, (LAYERS, 7), SLOTS), {}, 0
    for what, given_ in steps:
        if what == "place":
            layout = layout_of(*given_)
            end = begin + WORLD * layout.elements
            if arenas.pool.can_place(layout.elements) and end <= HOST:
                live[arenas.place(layout, host[begin:end])] = host[begin:end].view(WORLD, -1)
                begin = end
        elif what == "evict" and given_ in live:
            del live[given_]
            arenas.evict(given_)
        elif what == "deliver":
            arenas.mail.deliver()
    for rank, arena in enumerate(arenas.settle()):
        for slot, image in live.items():
            blocks = arena.blocks(arenas.pool.placed()[slot].pieces)
            assert torch.equal(torch.cat(blocks), image[rank])


@pytest.fixture(scope="module", params=[2, 4])
def experts(request, tmp_path_factory):
    """Number of ranks, a host arena with adapters of experts, and each rank's parts of them."""
    shelf, world, made = Shelf(tmp_path_factory.mktemp("blobs")), request.param, []
    for number, ranks in enumerate(OF_EXPERTS):
        ref = shelf.make(f"{number}", ranks, alpha=7.0, shape=MOE)
        spec = read_spec(shelf.blob(ref.name), MOE, AdapterLimits(64, 1 << 20))
        made.append((spec, PackedLayout.of(spec, MOE, world), shelf.tensors(ref)))
    host = torch.full((sum(layout.image_elements for _, layout, _ in made),), torch.nan)
    adapters, images = [], host.split([layout.image_elements for _, layout, _ in made])
    for number, ((spec, layout, tensors), image) in enumerate(zip(made, images, strict=True)):
        pack(shelf.blob(f"{number}"), spec, layout, image)
        adapters.append((layout, image, tensors))
    return world, host, adapters


def part_of(linear: int, a: torch.Tensor, b: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """A and transposed B of a linear that a rank should have."""
    name, heads = MOE.linears[linear].name, min(world, MOE.kv_heads)
    if name in ("o_proj", "down_proj"):
        a = a.chunk(world, dim=-1)[rank]
    elif name in ("k_proj", "v_proj"):
        b = b.chunk(heads, dim=-2)[rank * heads // world]
    elif name != "gate":
        b = b.chunk(world, dim=-2)[rank]
    return a, b.mT


@given(steps=steps_of(st.integers(0, len(OF_EXPERTS) - 1)))
@settings(max_examples=40, deadline=None)
def test_all_arenas_hold_their_ranks_part_of_every_expert(experts, steps):
    world, host, adapters = experts
    room = 5 * max(layout.elements for layout, *_ in adapters) // 3
    rows = MOE.layers + 1, len(MOE.modules)
    arenas, live = Arenas(world, host, room, rows, SLOTS), {}
    for what, given_ in steps:
        if what == "place":
            layout, image, tensors = adapters[given_]
            if arenas.pool.can_place(layout.elements):
                live[arenas.place(layout, image)] = tensors
        elif what == "evict" and given_ in live:
            del live[given_]
            arenas.evict(given_)
        elif what == "deliver":
            arenas.mail.deliver()
    for rank, arena in enumerate(arenas.settle()):
        assert {*arena.weights.table.flatten(1).any(1).nonzero().flatten().tolist()} == {*live}
        for slot, tensors in live.items():
            for (layer, linear), (a, b) in tensors.items():
                *begins, lora_rank = arena.weights.table[slot, layer, linear].tolist()
                assert lora_rank == a.shape[-2]
                for at, want in zip(begins, part_of(linear, a, b, rank, world), strict=True):
                    got = arena.weights.arena[at : at + want.numel()]
                    assert torch.equal(got, want.flatten())


def test_a_copy_is_over_once_all_ranks_have_copied():
    host = torch.arange(1.0, 129.0)
    arenas = Arenas(2, host, ARENA, (LAYERS, 7), SLOTS)
    placement = arenas.pool.place(layout_of(64, *[0] * (LAYERS - 1)))
    arenas.leader.run(*placement.commands)
    copy = arenas.leader.copy(host, placement.pieces)
    assert not copy.event.others.is_over
    arenas.mail.deliver_all()
    assert copy.event.others.is_over


@pytest.mark.parametrize(
    "harm",
    [
        lambda arena, _: arena.run(ReadsEnd(0), WriteRow(SLOTS, np.zeros((LAYERS, 7, 3)))),
        lambda arena, host: arena.copy(host, (Piece(ARENA - 32, 0, 64),)),
    ],
)
def test_an_error_in_the_leaders_arena_alone_ends_all_ranks(harm):
    """Otherwise the followers would continue with other adapters than the leader."""
    host = torch.arange(1.0, 129.0)
    arenas = Arenas(2, host, ARENA, (LAYERS, 7), SLOTS)
    with pytest.raises(DeviceLost, match="out of step"):
        harm(arenas.leader, host)
