"""Accesses of the programs of a launch, seen in Triton's interpreter: who reads and writes which bytes.

The interpreter runs one program after the other, in ascending order. A GPU runs them in any order and at once, so here
the order is shuffled, every access has to lie within a tensor of the launch, and no two programs may touch a byte that
one of them writes. Exempt are atomics among themselves, and accesses that an atomic orders: what a program did before
it released a counter is seen by whoever acquires that counter later, such as the last program, which adds up.
"""

from __future__ import annotations

import contextlib
import zlib
from functools import cached_property
from unittest import mock

import numpy as np
import torch

from rollout_corr.kernels import launches

READ, WRITE, ATOMIC = "reads", "writes", "adds to"


class Accesses:
    """The accesses of one launch, and the order that its atomics establish among its programs."""

    def __init__(self, launch, seed):
        self.kernel = launch.kernel.__name__
        self.tensors = dict(tensors_in(launch.arguments))
        self.extents = [extent_of(x) for x in self.tensors.values()]
        self.seed, self.programs = seed, launch.programs
        self.program = 0
        # How often each program has released something, and how many releases of others it had acquired by then.
        self.releases = {}
        self.acquired = {}
        # What a counter hands on: of each program that released it, how many releases.
        self.handed_on = {}
        self.groups = {}  # (program, its releases so far, kind) -> number
        self.log = []  # (number of the group, addresses, bytes of each)

    @cached_property
    def order(self):
        """The program that runs at each place."""
        drawn = np.random.default_rng([self.seed, zlib.crc32(self.kernel.encode()), self.programs])
        return drawn.permutation(self.programs).tolist()

    def add(self, kind, pointers, mask):
        """Take down an access of the program that runs."""
        # A mask of a vector and a scalar comparison is int32 in the interpreter, which Triton 3.9 refuses.
        assert mask.data.dtype == bool, f"{self.kernel}: a mask is {mask.data.dtype}"
        taken = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        if not taken.size:
            return taken
        each = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        first, end = int(taken.min()), int(taken.max()) + each
        assert any(low <= first and end <= high for low, high in self.extents), (
            f"{self.kernel}: program {self.program} {kind} bytes outside of every tensor"
        )
        group = (self.program, self.releases.get(self.program, 0), kind)
        self.log.append((self.groups.setdefault(group, len(self.groups)), taken, each))
        return taken

    def order_by(self, addresses, acquires, releases):
        """Let an atomic take over what its counter hands on, and hand on what its program has done and knows."""
        program, done = self.program, self.releases.get(self.program, 0)
        known = dict(self.acquired.get((program, done), {}))
        if acquires:
            for address in addresses.tolist():
                merge(known, self.handed_on.get(address, {}))
        if releases:
            for address in addresses.tolist():
                merge(self.handed_on.setdefault(address, {}), {**known, program: done + 1})
        self.releases[program] = done + 1
        self.acquired[program, done + 1] = known

    def check(self):
        """Require that every two programs that touch a byte only read it, only add to it, or are ordered."""
        bytes_of = [(group, (taken[:, None] + np.arange(each)).ravel()) for group, taken, each in self.log]
        groups = list(self.groups)
        changed = [taken for group, taken in bytes_of if groups[group][2] != READ]
        if not changed:
            return
        written = np.unique(np.concatenate(changed))
        keys = []
        for group, taken in bytes_of:
            place = np.minimum(np.searchsorted(written, taken), len(written) - 1)
            keys.append(place[written[place] == taken] * len(groups) + group)
        place, group = np.divmod(np.unique(np.concatenate(keys)), len(groups))
        longest = int(np.bincount(place).max())
        for step in range(1, longest):
            both = place[step:] == place[:-step]
            pairs = group[:-step][both] * len(groups) + group[step:][both]
            for pair, at in zip(*np.unique(pairs, return_index=True), strict=True):
                one, other = groups[pair // len(groups)], groups[pair % len(groups)]
                if self.conflict(one, other):
                    raise AssertionError(self.described(one, other, int(written[place[:-step][both][at]])))

    def conflict(self, one, other):
        """Tell whether two groups of accesses to the same byte depend on which of their programs comes first."""
        kinds = {one[2], other[2]}
        if one[0] == other[0] or kinds in ({READ}, {ATOMIC}):
            return False
        return not (self.before(one, other) or self.before(other, one))

    def before(self, one, other):
        """Tell whether the second program had acquired what the first released after its access."""
        return self.acquired.get(other[:2], {}).get(one[0], 0) > one[1]

    def described(self, one, other, address):
        """Name kernel, programs, tensor and index of a conflict."""
        places = [
            f"{name}[{(address - x.data_ptr()) // x.element_size()}]"
            for (name, x), (low, high) in zip(self.tensors.items(), self.extents, strict=True)
            if low <= address < high
        ]
        (first, _, does), (second, _, also) = one, other
        return f"{self.kernel}: program {first} {does} {' = '.join(places)}, and program {second} {also} it"


def merge(known, others):
    """Take over the larger number of each program."""
    for program, count in others.items():
        known[program] = max(known.get(program, 0), count)


@contextlib.contextmanager
def observed(seed=0, races=True):
    """Shuffle the programs of every launch, and check what they read and write; on a GPU, compute-sanitizer looks.

    Args:
        seed: Another one is another order of the programs.
        races: Whether two programs that touch a byte are looked for, in addition to accesses outside of every tensor.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    run, load, store = launches.Launch.run, builder.create_masked_load, builder.create_masked_store
    rmw, cas, place = builder.create_atomic_rmw, builder.create_atomic_cas, builder.set_grid_idx
    seen = None

    def launched(launch):
        nonlocal seen
        seen = Accesses(launch, seed)
        run(launch)
        if races:
            seen.check()

    def placed(self, x, y, z):
        seen.program = seen.order[x]
        place(self, seen.program, y, z)

    def loading(self, pointers, mask, *others):
        seen.add(READ, pointers, mask)
        return load(self, pointers, mask, *others)

    def storing(self, pointers, value, mask, *others):
        seen.add(WRITE, pointers, mask)
        return store(self, pointers, value, mask, *others)

    def ordered(pointers, mask, sem, scope):
        addresses, order = seen.add(ATOMIC, pointers, mask), sem.name
        # Within a program's own scope nothing is handed to another one.
        if order != "RELAXED" and scope.name != "CTA":
            seen.order_by(addresses, order != "RELEASE", order != "ACQUIRE")

    def adding(self, operation, pointers, value, mask, sem, scope):
        ordered(pointers, mask, sem, scope)
        return rmw(self, operation, pointers, value, mask, sem, scope)

    def exchanging(self, pointers, compared, value, sem, scope):
        ordered(pointers, interpreter.TensorHandle(np.ones(1, dtype=bool), None), sem, scope)
        return cas(self, pointers, compared, value, sem, scope)

    with contextlib.ExitStack() as stack:
        for owner, name, changed in (
            (launches.Launch, "run", launched),
            (builder, "set_grid_idx", placed),
            (builder, "create_masked_load", loading),
            (builder, "create_masked_store", storing),
            (builder, "create_atomic_rmw", adding),
            (builder, "create_atomic_cas", exchanging),
        ):
            stack.enter_context(mock.patch.object(owner, name, changed))
        yield


def tensors_in(arguments):
    """Every tensor among the arguments of a launch, by name."""
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor):
            yield name, x
        elif isinstance(x, tuple):
            yield from tensors_in({f"{name}[{i}]": entry for i, entry in enumerate(x)})


def extent_of(x):
    """The first address of a tensor, and the one behind its last element."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
