"""Log-probs that are equal but for one ulp at planted tokens, and what `doctor --exact` has to say of them.

`python -m builders.planted_bits` writes the table of tests/diagnose/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.diagnose.doctor.in_common import InCommon, in_common
from rollout_corr.diagnose.measure.bits import Bits
from rollout_corr.diagnose.read.chunk import ValidTokens
from rollout_corr.diagnose.read.fields import ChosenFields
from rollout_corr.diagnose.read.tensor_files import TensorFile

VOCABULARY = 400
BY = ("rank", "batch_size", "expert")


class Dump:
    """Columns of a dump of sequences in groups of four, some of whose first tokens are shared."""

    def __init__(self, seed: int, sequences: int, median: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        lengths = (median * torch.randn(sequences, generator=self.generator).mul(0.4).exp()).long()
        self.lengths, self.median = lengths.clamp(8, 6 * median), median
        self.count, self.sequences = int(self.lengths.sum()), sequences
        self.offsets = torch.tensor([0, *self.lengths.tolist()]).cumsum(0)
        self.owner = torch.arange(sequences).repeat_interleave(self.lengths)
        self.position = torch.arange(self.count) - self.offsets[self.owner]
        self.logp = -2.0 * self.uniform(self.count) ** 3 - 1e-3
        self.ids = (VOCABULARY * self.uniform(self.count) ** 3).long()
        self.prompts = self.whole(20, 300)
        self.cached = self.prompts // 16 * 16 * (self.uniform(sequences) < 0.5)
        self.rank, self.batch_size = self.whole(0, 8), self.whole(1, 5) * 8
        self.version, self.step = self.whole(3, 9), torch.arange(sequences) * 6 // sequences
        self.expert = (16 * self.uniform(self.count) ** 2).long()
        self.turn = self.position * 5 // (self.lengths[self.owner] + 1)
        self.differs = torch.zeros(self.count, dtype=torch.bool)

    def uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self.generator)

    def whole(self, first: int, last: int) -> Tensor:
        return torch.randint(first, last, (self.sequences,), generator=self.generator)

    def share_prefixes(self) -> Tensor:
        """Let the sequences of a group of four begin alike; return how many ids each shares with earlier ones."""
        shared = self.whole(3, 160).view(-1, 4)[:, :1].expand(-1, 4).reshape(-1).minimum(self.lengths - 2)
        shared = shared.where(torch.arange(self.sequences) % 4 > 0, 0)
        leader = torch.arange(self.sequences) // 4 * 4
        shared = shared.minimum(self.lengths[leader])
        inside = self.position < shared[self.owner]
        self.ids[inside] = self.ids[(self.offsets[leader[self.owner]] + self.position)[inside]]
        # Where the sequences part, their ids differ.
        parts = (self.position == shared[self.owner]) & (shared[self.owner] > 0)
        self.ids[parts] = VOCABULARY + self.owner[parts]
        seen: set[tuple[int, ...]] = set()
        found = []
        for ids in self.ids.split(self.lengths.tolist()):
            prefixes = [tuple(ids[:i].tolist()) for i in range(1, ids.numel() + 1)]
            found.append(sum(prefix in seen for prefix in prefixes))
            seen.update(prefixes)
        return torch.tensor(found)

    def columns(self) -> dict[str, Tensor]:
        train = torch.where(self.differs, torch.nextafter(self.logp, torch.tensor(-torch.inf)), self.logp)
        return {
            "train_logp": train,
            "rollout_logp": self.logp,
            "cu_seqlens": self.offsets,
            "token_ids": self.ids,
            "prompt_lengths": self.prompts,
            "cached_tokens": self.cached,
            "versions": self.version,
            "steps": self.step,
            "turns": self.turn,
            "rank": self.rank,
            "batch_size": self.batch_size,
            "expert": self.expert,
        }


# Gives the tokens of a kind in a dump, and the kind and the parameters that have to be named.
Plant = Callable[[Dump], tuple[Tensor, dict[str, object]]]


def plants(of: Callable[[Dump, int], Tensor], *values: int, name: str = "at", **wanted: object) -> tuple[Plant, ...]:
    """Plant in the tokens, or the sequences, that a value chooses; it has to be named too."""

    def plant(value: int, dump: Dump) -> tuple[Tensor, dict[str, object]]:
        chosen = of(dump, value)
        return chosen if chosen.numel() == dump.count else chosen[dump.owner], wanted | {name: value}

    return tuple(partial(plant, value) for value in values)


def behind_page(dump: Dump, page: int) -> Tensor:
    return (dump.position + dump.prompts[dump.owner]) % page == 0


def behind_prefix(dump: Dump, page: int) -> Tensor:
    hit = (dump.share_prefixes() // page * page)[dump.owner]
    return (hit > 0) & (dump.position >= hit)


def longer(chunk: int) -> Plant:
    """Plant in the sequences over a chunk, which is smaller where sequences are short."""

    def plant(dump: Dump) -> tuple[Tensor, dict[str, object]]:
        at = chunk if dump.median > chunk / 2 else chunk // 2
        return (dump.lengths > at)[dump.owner], {"kind": "length", "at": at}

    return plant


def cached(dump: Dump) -> tuple[Tensor, dict[str, object]]:
    return (dump.cached > 0)[dump.owner], {"kind": "prefix_hit", "of": "cached_tokens"}


def first_token(dump: Dump) -> tuple[Tensor, dict[str, object]]:
    return dump.position == 0, {"kind": "first_token"}


class Kind(NamedTuple):
    """A kind of differences, and the columns that are left out."""

    name: str
    plants: tuple[Plant, ...]
    without: tuple[str, ...] = ("cached_tokens",)


KINDS = (
    Kind(
        "behind the border of a page of 16 to 128",
        plants(behind_page, 16, 32, 64, 128, name="page", kind="page", at=0),
    ),
    Kind(
        "the same, the prompts' lengths not given",
        plants(behind_page, 16, 32, name="page", kind="page_of_each"),
        ("cached_tokens", "prompt_lengths"),
    ),
    Kind(
        "behind a shared prefix, in pages of 1 to 64",
        plants(behind_prefix, 1, 16, 32, 64, name="page", kind="prefix_hit"),
    ),
    Kind("behind a hit that the engine reports", (cached,), ()),
    Kind("from turn 1, 2, 3 on", plants(lambda dump, first: dump.turn >= first, 1, 2, 3, kind="turn")),
    Kind("the first token", (first_token,)),
    Kind(
        "from position 5 to 120 on",
        plants(lambda dump, first: dump.position >= first, 5, 32, 67, 120, kind="position"),
    ),
    Kind("one rank of eight", plants(lambda dump, rank: dump.rank == rank, 0, 3, 7, kind="label")),
    Kind("one size of a batch", plants(lambda dump, size: dump.batch_size == size, 8, 32, kind="label")),
    Kind(
        "one row of 8 or 16",
        (
            *plants(lambda dump, row: dump.owner % 8 == row, 0, kind="row", page=8),
            *plants(lambda dump, row: dump.owner % 16 == row, 5, kind="row", page=16),
        ),
    ),
    Kind("one expert of sixteen", plants(lambda dump, expert: dump.expert == expert, 0, 5, 15, kind="label")),
    Kind("sequences over a chunk of 64, 128 or 256", tuple(map(longer, (128, 256)))),
    Kind("one token id", plants(lambda dump, value: dump.ids == value, 0, 10, 150, kind="token_id")),
    Kind(
        "one version, one step, or from a step on",
        (
            *plants(lambda dump, version: dump.version == version, 5, kind="version"),
            *plants(lambda dump, step: dump.step == step, 2, kind="step"),
            *plants(lambda dump, first: dump.step >= first, 4, kind="from"),
        ),
    ),
)


# --- what has nothing in common


def from_anywhere(dump: Dump) -> Tensor:
    """Part at some token, and differ ever after."""
    chosen = torch.isin(dump.owner, dump.owner[dump.uniform(dump.count) < 0.004])
    begins = (dump.uniform(dump.count) < 0.004).long()
    running = begins.cumsum(0)
    return chosen & (running > (running - begins)[dump.offsets[:-1]][dump.owner])


def bursts(dump: Dump) -> Tensor:
    begins = dump.uniform(dump.count) < 0.002
    return torch.nn.functional.max_pool1d(begins.float()[None], 17, 1, 8)[0] > 0


RANDOM: dict[str, Callable[[Dump], Tensor]] = {
    "2 % of the tokens": lambda dump: dump.uniform(dump.count) < 0.02,
    "five tokens": lambda dump: dump.uniform(dump.count) < 5.0 / dump.count,
    "half of the tokens of random sequences": lambda dump: (
        (dump.uniform(dump.sequences) < 0.2)[dump.owner] & (dump.uniform(dump.count) < 0.5)
    ),
    "a rate for each sequence": lambda dump: dump.uniform(dump.count) < (dump.uniform(dump.sequences) ** 6)[dump.owner],
    "everything behind a random token": from_anywhere,
    "bursts": bursts,
    # As rounding does.
    "the more, the less likely": lambda dump: dump.uniform(dump.count) < dump.logp.abs() / 4,
    # As unlikely ids do.
    "a rate for each id": lambda dump: (dump.uniform(VOCABULARY * 10) ** 4)[dump.ids] > dump.uniform(dump.count),
}

SEEDS = range(100, 104)
# Sequences, their median length, the share of the kind's tokens that differ, and random differences to one planted.
SETTINGS = ((96, 150, 1.0, 0.0), (192, 60, 0.5, 0.0), (256, 150, 0.1, 0.0), (128, 150, 0.5, 0.02))


def found_in(dump: Dump, differs: Tensor, without: tuple[str, ...] = ()) -> list[InCommon]:
    """Give some tokens of a dump one ulp, and return what `doctor --exact` finds that they have in common."""
    dump.differs = differs
    columns = {name: x for name, x in dump.columns().items() if name not in without}
    bits = Bits(BY)
    for chunk in TensorFile(columns, 1 << 30, "dump", ChosenFields({}, BY)).chunks():
        bits.add(ValidTokens.of(chunk))
    assert (bits.differing, bits.ulps) == (int(differs.sum()), int(differs.any()))
    return in_common(bits, {})


def is_right(found: list[InCommon], wanted: dict[str, object]) -> bool:
    """Return whether one thing is named, and it is the planted one with its parameter."""
    return len(found) == 1 and all(getattr(found[0], name) == value for name, value in wanted.items())


def planted(
    plant: Plant, seed: int, setting: tuple[int, int, float, float], without: tuple[str, ...]
) -> tuple[list[InCommon], dict[str, object], Tensor]:
    sequences, median, share, noise = setting
    dump = Dump(seed, sequences, median)
    chosen, wanted = plant(dump)
    differs = chosen & (dump.uniform(dump.count) < share)
    differs |= dump.uniform(dump.count) < noise * differs.double().mean()
    return found_in(dump, differs, without), wanted, differs


BEGIN = "<!-- made by `python -m builders.planted_bits`; a test compares them -->"
END = "<!-- end of what the differences have in common -->"
RANDOM_SEEDS = range(100, 110)


def table() -> str:
    """Return the table of what was named right over `SETTINGS` and `SEEDS`, and what was named where nothing is."""
    rows, right, count = [], 0, 0
    for kind in KINDS:
        named = [
            is_right(*planted(plant, seed, setting, kind.without)[:2])
            for plant in kind.plants
            for setting in SETTINGS
            for seed in SEEDS
        ]
        rows.append(f"| {kind.name} | {len(named)} | {sum(named)} |")
        right, count = right + sum(named), count + len(named)
    wrong = [
        bool(found_in(dump, make(dump)))
        for make in RANDOM.values()
        for setting in SETTINGS
        for seed in RANDOM_SEEDS
        for dump in [Dump(seed, *setting[:2])]
    ]
    said = (
        f"{right} of {count} dumps ({100 * right / count:.1f} %) get the planted kind and its parameter, and nothing "
        f"else. {sum(wrong)} of {len(wrong)} dumps whose differences are random in {len(RANDOM)} ways get a kind."
    )
    return "\n".join(
        [BEGIN, "", said, "", "| one ulp is planted | dumps | named right |", "|---|---|---|", *rows, "", END]
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(f"{table()}\n")
