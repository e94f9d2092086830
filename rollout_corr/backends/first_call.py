"""The first call on a new kind of device: compares the kernels with plain torch on that batch's first sequences.

It runs once per process, call and kind of device. A difference raises. Later calls are not checked, those of other
Specs neither, whose kernels are other code: the launcher replaces its `FirstCall`, so that a call costs nothing more,
and a run that has started does not end by a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..specs.operands import CorrectOperands, LossOperands

# Tokens that are compared, of whole sequences: more where the first sequence is longer.
TOKENS = 4096
# Floats may be apart by this part of their size: 30 times what roundings of float32 add up to, far below any fault.
WITHIN = 3e-5
# Log-probs are moved by this to find what lies on a threshold. There an exponential of another device may decide
# otherwise, which then is no fault. A result that moves by more than `JUMP` of itself has crossed one.
MOVED, JUMP = 1e-5, 0.1

# Calls that are compared where those before decided nothing; after these the 32nd, the 64th and so on.
TRIES = 16

# The names of the calls and the kinds of devices on which they have been compared.
COMPARED: set[tuple[str, str]] = set()


class Output(NamedTuple):
    """A result to compare."""

    values: Tensor
    size: float | Tensor | None = None  # about as large as what it is made of; None: it is compared exactly
    names: tuple[str, ...] = ()  # of the elements of statistics; of other results none


Outputs = Mapping[str, Output]


class FirstCall:
    """Stands for a launcher of kernels until they have been compared on every kind of device that is there.

    `by_kernels` gives the results of operands by the kernels, `by_torch` those of operands on the CPU by plain torch;
    `over` is called when nothing is left to compare. Where they differ, `run` raises RuntimeError.
    """

    def __init__(
        self,
        call: str,
        launcher: Any,
        by_kernels: Callable[[Any, Any], Outputs],
        by_torch: Callable[[Any, Any], Outputs],
        over: Callable[[], None],
    ) -> None:
        self.call, self.launcher, self.over = call, launcher, over
        self.by_kernels, self.by_torch = by_kernels, by_torch
        self.calls = 0

    def run(self, operands: Any, wanted: Any, *more: Any) -> Any:
        """Compare where that is possible now, then run the call."""
        kind = kind_of(operands.first.device)
        due = kind is not None and (self.call, kind) not in COMPARED and may_wait() and self._is_due()
        if kind is not None and due and self.agrees(operands, wanted):
            COMPARED.add((self.call, kind))
        if all((self.call, kind) in COMPARED for kind in kinds()):
            self.over()
        return self.launcher.run(operands, wanted, *more)

    def __getattr__(self, name: str) -> Any:
        """Look up everything else on the launcher."""
        return getattr(self.launcher, name)

    def _is_due(self) -> bool:
        """Return whether to compare now. Batches that never decide anything, such as equal log-probs, cost little."""
        self.calls += 1
        return self.calls <= TRIES or self.calls & (self.calls - 1) == 0

    def agrees(self, operands: Any, wanted: Any) -> bool:
        """Compare a part of a call; False where it decides nothing, and the next call has to be compared."""
        part = first_sequences(operands)
        if part is None:
            return False
        on_cpu = _on_cpu(part)
        expected = self.by_torch(on_cpu, wanted)
        if not _says_something(on_cpu, expected):
            return False
        got = self.by_kernels(part, wanted)
        wrong = _apart(got, expected, WITHIN)
        if not wrong:
            return True
        moved = [_apart(self.by_torch(one, wanted), expected, JUMP) for one in _moved(on_cpu)]
        for name, places in wrong.items():
            for jumps in moved:
                if expected[name].names:
                    places = places & (not jumps)  # a statistic is of all tokens
                elif name in jumps:
                    places = places & ~jumps[name]
            if bool(places.any()):
                raise RuntimeError(self._message(operands.first, name, got[name], expected[name], places, wanted))
        return False

    def _message(self, tokens: Tensor, name: str, got: Output, expected: Output, places: Tensor, wanted: object) -> str:
        """Say what differs, where, and how to go on."""
        import triton

        device, place = tokens.device, places.nonzero()[0].tolist()
        where = f" {got.names[place[0]]}" if got.names else "".join(f"[{i}]" for i in place)
        by_kernels, by_torch = (x.values.cpu()[tuple(place)].item() for x in (got, expected))
        return (
            f"rollout_corr.{self.call}: the Triton kernels differ from plain torch on {device} ({kind_of(device)}): "
            f"{name}{where} is {by_kernels!r} by the kernels and {by_torch!r} by plain torch "
            f"({int(places.sum())} of {places.numel()} values differ; torch {torch.__version__}, Triton "
            f"{triton.__version__}). To go on without the kernels, start again with ROLLOUT_CORR_BACKEND=torch in the "
            f"environment or pass backend='torch'; and please report this message. The call: {wanted!r}"
        )


def launcher_of(
    call: str,
    launcher: Any,
    by_kernels: Callable[[Any, Any], Outputs],
    by_torch: Callable[[Any, Any], Outputs],
    over: Callable[[], None],
) -> Any:
    """A launcher, behind its `FirstCall` as long as there is a kind of device on which that is still to come."""
    if all((call, kind) in COMPARED for kind in kinds()):
        return launcher
    return FirstCall(call, launcher, by_kernels, by_torch, over)


def kind_of(device: torch.device) -> str | None:
    """The kind of a device that kernels are compared on; None for the CPU, where they run in the interpreter alone."""
    return torch.cuda.get_device_properties(device).name if device.type == "cuda" else None


def kinds() -> set[str]:
    """The kinds of all devices that this process sees."""
    return {torch.cuda.get_device_properties(i).name for i in range(torch.cuda.device_count())}


def may_wait() -> bool:
    """Return whether results may be read now: no graph is captured, nobody forbids syncs, and launches are launched."""
    from ..kernels.launches import only_compiles

    return not (torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode() or only_compiles())


# --- a part of a batch ---


def first_sequences(operands: CorrectOperands | LossOperands) -> Any:
    """The first whole sequences of a batch, some `TOKENS` tokens; None where none have a token.

    Beginning with the first keeps the alignment of addresses, and so the compiled kernels.
    """
    # The operands alone: what else a record has is of the whole batch.
    kind: type[Any] = CorrectOperands if isinstance(operands, CorrectOperands) else LossOperands
    tokens, given = operands.first, {each.name: getattr(operands, each.name) for each in fields(kind)}
    if operands.offsets is None:
        if not tokens.numel():
            return None
        sequences = of_tokens = min(tokens.shape[0], max(1, TOKENS // tokens.shape[1]))
        end = sequences * tokens.shape[1]
    else:
        offsets = operands.offsets.tolist()
        if offsets != sorted(offsets) or offsets[0] < 0 or offsets[-1] > tokens.shape[0] or offsets[0] == offsets[-1]:
            return None  # offsets on a device are taken as they are, and wrong ones give wrong numbers
        with_some = next(i for i, end in enumerate(offsets) if end > offsets[0])
        sequences = max(with_some, sum(end <= TOKENS for end in offsets) - 1)
        end = of_tokens = offsets[sequences]
    if operands.turns is not None:
        turns = operands.turns.tolist()
        if turns != sorted(turns) or end not in turns:
            return None
        given["turns"] = operands.turns[: turns.index(end) + 1]

    def cut_to(name: str, x: Any) -> Any:
        if name == "step":
            return x._replace(**{inner: cut_to(inner, y) for inner, y in x._asdict().items()})
        if name == "externals":
            return type(x)([one[:of_tokens] for one in x])
        if name == "offsets" and x is not None:
            return x[: sequences + 1]
        if name == "advantages" and operands.per_sequence:
            return x[:sequences]
        if name == "versions" and x is not None:
            return x._replace(ids=x.ids[: sequences if x.per_sequence else of_tokens])
        return x[:of_tokens] if isinstance(x, Tensor) and name not in ("turns", "divisor") else x

    return kind(**{name: cut_to(name, x) for name, x in given.items()})


def _on_cpu(x: Any) -> Any:
    """Operands, and whatever holds tensors in them, with copies of these on the CPU."""
    if isinstance(x, Tensor):
        return x.detach().cpu()
    if isinstance(x, (CorrectOperands, LossOperands)):
        return type(x)(**{name: _on_cpu(y) for name, y in vars(x).items()})
    if hasattr(x, "_fields"):
        return type(x)(*map(_on_cpu, x))
    return type(x)(map(_on_cpu, x)) if isinstance(x, (list, tuple)) else x


def _says_something(operands: CorrectOperands | LossOperands, expected: Outputs) -> bool:
    """Return whether a part on the CPU has a token with a gradient, or a valid one whose log-probs differ."""
    if not isinstance(operands, CorrectOperands):
        return bool((expected["gradient"].values != 0).any())
    differs = operands.train != operands.rollout
    differs = differs if operands.mask is None else differs & (operands.mask != 0)
    return bool((differs if operands.offsets is None else differs[slice(*operands.offsets[[0, -1]].tolist())]).any())


def _moved(operands: Any) -> list[Any]:
    """Copy a call, or the step in it, with each of its policies moved up and down by `MOVED`."""
    found = []
    every = operands._asdict() if hasattr(operands, "_fields") else vars(operands)
    for name, x in every.items():
        moved = _moved(x) if name == "step" else []
        if name in ("train", "rollout", "new", "base", "ref") and x is not None:
            wide = x if x.dtype == torch.float64 else x.float()
            moved = [wide + MOVED, wide - MOVED]
        found += [type(operands)(**every | {name: one}) for one in moved]
    return found


# --- the comparison ---


def _apart(got: Outputs, expected: Outputs, within: float) -> dict[str, Tensor]:
    """Where results are apart: a bool for each element of each result that has such an element."""
    found = {}
    for name, wanted in expected.items():
        one, other = (x.values.cpu() for x in (got[name], wanted))
        if one.dtype == torch.bool:
            one, other = one.view(torch.uint8), other.view(torch.uint8)
        apart = (one != other) & ~(one.isnan() & other.isnan())
        if wanted.size is not None:
            one, other = one.double(), other.double()
            room = within * torch.maximum(other.abs(), torch.as_tensor(wanted.size, dtype=torch.float64))
            apart &= ~((one - other).abs() <= room)
        if bool(apart.any()):
            found[name] = apart
    return found


def results(**found: tuple[Tensor | None, float | None]) -> dict[str, Output]:
    """Results with their sizes by name, without those that are not there."""
    return {name: Output(x.detach(), size) for name, (x, size) in found.items() if x is not None and x.numel()}


def statistics(values: Mapping[str, float], sizes: Mapping[str, float | None]) -> dict[str, Output]:
    """Statistics by name as results: counts, whose size is None, and sums."""
    found = {}
    for kind, exact in (("count", True), ("statistic", False)):
        names = tuple(name for name, size in sizes.items() if (size is None) == exact)
        vector = torch.tensor([values[name] for name in names], dtype=torch.float64, device="cpu")
        size = None if exact else torch.tensor([sizes[name] for name in names], dtype=torch.float64, device="cpu")
        found[kind] = Output(vector, size, names)
    return found
