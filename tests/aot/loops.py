"""Which instructions of a disassembly stand in a loop: those that a path of branches leads back to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        text: The mnemonic and its operands, with the predicate before them.
        places: The names that branches have for it: its address, or the labels before it.
    """

    text: str
    places: tuple[str, ...]


class Branches(NamedTuple):
    """How a machine says where execution goes on.

    Attributes:
        target: Finds the place that a branch names.
        ends: Matches what never goes on with the next instruction.
    """

    target: re.Pattern[str]
    ends: re.Pattern[str]


# With a predicate, before the mnemonic or behind it, a branch may go on. A call does; what it calls is in no loop.
SASS = Branches(re.compile(r"\bBRA\b[^;]*?\b(0x[0-9a-f]+)"), re.compile(r"BRA 0x|EXIT|RET\b"))
AMD = Branches(re.compile(r"^s_c?branch\w*\s+(\.L\w+)"), re.compile(r"s_branch|s_endpgm|s_setpc_b64"))


def in_loops(instructions: Sequence[Instruction], branches: Branches) -> set[int]:
    """Give the numbers of the instructions that are in a loop.

    Raises:
        ValueError: A branch goes where no instruction is.
    """
    where = {place: i for i, one in enumerate(instructions) for place in one.places}
    follows: list[list[int]] = []
    for i, one in enumerate(instructions):
        found = branches.target.search(one.text)
        if found is not None and found[1] not in where:
            raise ValueError(f"disassembly: expected an instruction where {one.text!r} goes, got none")
        after = [] if found is None else [where[found[1]]]
        if branches.ends.match(one.text) is None and i + 1 < len(instructions):
            after.append(i + 1)
        follows.append(after)
    return _on_cycles(follows)


def _on_cycles(follows: list[list[int]]) -> set[int]:
    """Give the nodes of a graph that lie on a cycle, by Kosaraju's two searches."""
    comes: list[list[int]] = [[] for _ in follows]
    for node, after in enumerate(follows):
        for other in after:
            comes[other].append(node)
    seen: set[int] = set()
    order = [node for start in range(len(follows)) for node in _finished(start, follows, seen)]
    seen, found = set(), set()
    for start in reversed(order):
        together = _finished(start, comes, seen)
        if len(together) > 1 or start in follows[start]:
            found.update(together)
    return found


def _finished(start: int, follows: list[list[int]], seen: set[int]) -> list[int]:
    """List what is reached from a node and was not seen, in the order in which a search in depth is done with it."""
    if start in seen:
        return []
    seen.add(start)
    done: list[int] = []
    path: list[tuple[int, Iterable[int]]] = [(start, iter(follows[start]))]
    while path:
        node, rest = path[-1]
        for other in rest:
            if other not in seen:
                seen.add(other)
                path.append((other, iter(follows[other])))
                break
        else:
            path.pop()
            done.append(node)
    return done
