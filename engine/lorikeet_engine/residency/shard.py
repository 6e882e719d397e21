"""Which part of every linear's LoRA a process keeps when several share the model's layers.

                     q, k, v, gate, up            o, down
    sharded          A whole, B by output         A by input, B whole
    fully sharded    A by rank, B by output       A by input, B by output

Each of q, k, v, gate and up is cut on its own, as the base model's fused products are, at heads
where it has them. With o and down a process adds B A x of its inputs to its part of the base
product, and the sum over processes that the base product needs anyhow sums both. Fully sharded,
v = A x is short and is exchanged before B: gathered where A is cut by rank, summed where it is
cut by input; outputs of o and down that B leaves to others arrive with the base product's sum.
"""

from dataclasses import dataclass

from lorikeet_engine.adapter_format import BaseShape
from lorikeet_engine.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Cut:
    """What a process keeps of one linear: columns of A [rank, d_in], rows of B [d_out, rank].

    Of A's rows it keeps every `stride`-th from `first` on.
    """

    inputs: range
    outputs: range
    first: int = 0
    stride: int = 1

    def a_rows(self, rank: int) -> range:
        """The rows of A that are kept; none where the rank is smaller than `first` + 1."""
        return range(self.first, rank, self.stride)

    def elements(self, rank: int) -> tuple[int, int]:
        """The elements of A and of B that are kept."""
        return len(self.a_rows(rank)) * len(self.inputs), rank * len(self.outputs)


@dataclass(frozen=True, slots=True)
class Shard:
    """Process `index` of the `world` that compute the model's layers together; or the only one.

    fully: cut both matrices of every linear, for less memory and one exchange of v more.
    """

    index: int = 0
    world: int = 1
    fully: bool = False

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.world

    def cuts(self, shape: BaseShape) -> tuple[Cut, ...]:
        """One for each of LINEARS. Raises SettingsError when the base model cannot be cut so."""
        query = self._share(shape.heads, "num_attention_heads", shape.head_dim)
        kv = self._kv_share(shape)
        middle = self._share(shape.intermediate, "intermediate_size")
        hidden = range(shape.hidden)
        # Every world-th row of A, not a run of rows: gathered and interleaved, v comes out in
        # order whatever the ranks in a batch are, and a rank need not be a multiple of the world.
        by_rank = (self.index, self.world) if self.fully else (0, 1)
        back = self._share(shape.hidden, "hidden_size") if self.fully else hidden
        return (
            Cut(hidden, query, *by_rank),
            Cut(hidden, kv, *by_rank),
            Cut(hidden, kv, *by_rank),
            Cut(query, back),
            Cut(hidden, middle, *by_rank),
            Cut(hidden, middle, *by_rank),
            Cut(middle, back),
        )

    def _share(self, count: int, name: str, width: int = 1) -> range:
        """The process's elements of `count` pieces, each `width` wide."""
        if count % self.world:
            raise SettingsError(
                f"{name}={count} cannot be shared evenly by {self.world} processes: choose a "
                "number of GPUs that divides it"
            )
        share = count // self.world * width
        return range(self.index * share, (self.index + 1) * share)

    def _kv_share(self, shape: BaseShape) -> range:
        """Fewer heads than processes: several processes keep the head that their queries read."""
        if self.world <= shape.kv_heads or self.world % shape.kv_heads:
            return self._share(shape.kv_heads, "num_key_value_heads", shape.head_dim)
        head = self.index * shape.kv_heads // self.world
        return range(head * shape.head_dim, (head + 1) * shape.head_dim)


WHOLE = Shard()
