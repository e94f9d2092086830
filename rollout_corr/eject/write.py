"""Writing a recorded graph as source: what nothing uses falls away, what is equal is computed once."""

from __future__ import annotations

import inspect
import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .lines import WIDTH, fitted
from .record import CannotEject, Graph, Node, nodes_in

DEFINITION = f"{__name__.partition('.')[0]}.definition."
# Operators, with how tightly they bind.
INFIX = {
    "__or__": ("|", 1), "__and__": ("&", 2), "__ge__": (">=", 0), "__le__": ("<=", 0), "__gt__": (">", 0),
    "__lt__": ("<", 0), "__eq__": ("==", 0), "__ne__": ("!=", 0), "ge": (">=", 0), "le": ("<=", 0), "gt": (">", 0),
    "lt": ("<", 0), "eq": ("==", 0), "ne": ("!=", 0), "add": ("+", 3), "__add__": ("+", 3), "__radd__": ("+", 3),
    "sub": ("-", 3), "__sub__": ("-", 3), "__rsub__": ("-", 3), "mul": ("*", 4), "__mul__": ("*", 4),
    "__rmul__": ("*", 4), "div": ("/", 4), "__truediv__": ("/", 4), "__rtruediv__": ("/", 4), "rsub": ("-", 3),
    "__iand__": ("&", 2), "__rand__": ("&", 2),
}  # fmt: skip
SWAPPED = {"__rsub__", "__rtruediv__", "rsub"}
PREFIX = {"__neg__": ("-", 5), "neg": ("-", 5), "__invert__": ("~", 5), "bitwise_not": ("~", 5),
          "logical_not": ("~", 5)}  # fmt: skip
ATOM = 9
# Functions of torch without a method of the same arguments.
FUNCTIONS = {"where", "stack", "cat", "zeros", "ones", "arange", "full", "zeros_like", "ones_like", "aminmax",
             "segment_reduce", "count_nonzero", "maximum", "minimum", "searchsorted", "tensor"}  # fmt: skip
# Names of operations that are none of Python's.
FALLBACKS = {"and": "both", "or": "either", "invert": "others", "eq": "equal", "ne": "differs", "lt": "below",
             "gt": "above", "le": "at_most", "ge": "at_least", "where": "selected", "double": "number",
             "mul": "product", "sum": "total", "sub": "difference", "clamp": "clamped"}  # fmt: skip
# Operations that broadcast, to which an expanded tensor is as good as what was expanded.
BROADCASTING = {"__and__", "__iand__", "__or__", "where", "mul"}
# What is called after what it is made of.
DERIVED = {"__invert__": "not_{}", "__neg__": "minus_{}", "neg": "minus_{}"}
# Local names that say nothing.
EMPTY = {"x", "y", "one", "other"}
# Local names that say little; others come first.
POOR = {*EMPTY, "within", "value", "values", "found", "total", "signed", "here", "column", "joined", "which",
        "known", "left", "right", "row", "counted", "there", "result", "tested", "among", "select", "once", "tensor_of",
        "of", "spread", "sum", "limited", "sum_d_of", "sum_d_over", "inside_some", "inside", "fitting", "sum_integers",
        "count", "units", "some", "totals", "sum_of", "running", "double", "values_of", "per_sequence", "condition",
        "per_token", "stacked", "counts", "finite", "everywhere", "passed", "chosen"}  # fmt: skip


@dataclass
class Names:
    """The names of constants and sizes in a file."""

    sizes: dict[int, str]  # names of sizes by their value in the example
    numbers: dict[str, float]  # bounds by name, the clearest first
    shape: tuple[torch.Size, str]  # the shape of the tokens of the example, and how it is written
    device: str  # how the device is written
    mask_dtype: str  # how the dtype of the mask is written


class Writer:
    """Writes a graph as the body of a function."""

    def __init__(self, graph: Graph, names: Names, functions: Functions) -> None:
        self.graph, self.names, self.functions = graph, names, functions
        self.same: dict[Node, Node] = {}
        self.order: list[Node] = []

    # --- which operations ---

    def prepare(self, results: list[Node]) -> list[Node]:
        """Find what the results need, each once, and in order; return the results."""
        wanted: set[Node] = set()
        waiting = list(results)
        while waiting:
            node = waiting.pop()
            if node in wanted:
                continue
            wanted.add(node)
            waiting += node.inputs() if node.op != "call" else nodes_in(node.args[1:])
        keys: dict[Any, Node] = {}
        for node in self.graph.nodes:
            if node not in wanted:
                continue
            node.args, node.kwargs = self._mapped(node.args), self._mapped(node.kwargs)
            if (simpler := self._simpler(node)) is not None:
                self.same[node] = simpler
                self._give_names(node, simpler)
                continue
            if node.op == "double" and isinstance(node.args[0], Node) and POOR.issuperset(node.args[0].names):
                node.args[0].function_names += node.names
            if node.op == "call":
                node.args = (self.functions.of(node.args[0]), *node.args[1:])
            key = _key((node.op, node.args, node.kwargs))
            if isinstance(node.value, Tensor) and node.value.requires_grad:
                # Autograd adds up in the order of the operations, so each of them stays.
                key = node
            if key in keys:
                self.same[node] = keys[key]
                self._give_names(node, keys[key])
            else:
                keys[key] = node
                self.order.append(node)
        results = [self.same.get(node, node) for node in results]
        # Folding may have left some without a use.
        used: set[Node] = set()
        waiting = list(results)
        while waiting:
            node = waiting.pop()
            if node not in used:
                used.add(node)
                waiting += nodes_in((node.args, node.kwargs))
        self.order = [node for node in self.order if node in used]
        return results

    def _give_names(self, node: Node, to: Node) -> None:
        to.names += [name for name in node.names if name not in to.names]
        to.function_names += [name for name in node.function_names if name not in to.function_names]

    def _mapped(self, x: Any) -> Any:
        if isinstance(x, Node):
            return self.same.get(x, x)
        if isinstance(x, torch.Size):
            return x
        if isinstance(x, tuple):
            return tuple(map(self._mapped, x))
        if isinstance(x, list):
            return [self._mapped(one) for one in x]
        if isinstance(x, dict):
            return {key: self._mapped(one) for key, one in x.items()}
        return x

    def _simpler(self, node: Node) -> Node | None:
        """A node that is the same, bit by bit."""
        args = node.args
        if node.op in ("to", "double", "float", "long", "contiguous", "detach"):
            first = args[0]
            dtype = {"double": torch.float64, "float": torch.float32, "long": torch.int64}.get(node.op)
            if node.op == "to":
                dtype = args[1] if len(args) > 1 else node.kwargs.get("dtype")
            if node.op == "detach" and first.value.requires_grad:
                return None
            if node.op in ("contiguous", "detach") or (dtype == first.value.dtype and not node.kwargs):
                return first if isinstance(first, Node) else None
        if node.op in ("__and__", "__iand__") and len(args) == 2:
            for one, other in (args, args[::-1]):
                if isinstance(one, Node) and isinstance(other, Node) and _all_true(one) and \
                        other.value.shape == node.value.shape:  # fmt: skip
                    return other
        if node.op == "expand" and isinstance(args[0], Node) and args[0].value.shape == node.value.shape:
            return args[0]
        if node.op in BROADCASTING and not node.value.requires_grad:
            node.args = args = _unexpanded(node)
        if node.op in ("__and__", "__or__", "where") and (found := _of_never(node)) is not None:
            return found
        if node.op == "sum" and len(args) == 1 and not node.kwargs and isinstance(args[0], Node):
            one = args[0]
            if one.op == "to" and one.args[1] == torch.int64 and one.args[0].value.dtype == torch.bool:
                node.args = one.args[:1]
        if node.op == "__getitem__" and isinstance(args[0], Node) and args[0].op == "stack" and \
                isinstance(args[1], int):  # fmt: skip
            found = args[0].args[0][args[1]]
            return found if isinstance(found, Node) else None
        if node.op == "__getitem__" and args[1] == 0 and isinstance(args[0], Node) and args[0].op == "gather":
            # The first of several, whatever the choice is made of, as long as it is 0 everywhere.
            stacked, _, choice = args[0].args
            if stacked.op == "stack" and choice.op == "__getitem__" and choice.args[0].op == "zeros_like":
                return stacked.args[0][0]
        return None

    # --- how they are written ---

    def body(
        self, results: list[Node], sections: Callable[[Node], str | None] = lambda _: None, named: int = 0
    ) -> list[str]:
        """The lines of the operations; `result` gives the results afterwards, the first `named` by their names."""
        self.uses: Counter[Node] = Counter(nodes_in([(n.args, n.kwargs) for n in self.order]))
        self.uses.update(results)
        self.ends, self.by_name = set(results), set(results[:named])
        self.users: dict[Node, list[Node]] = {}
        # Where each is read last: what is used once may be written inside of its user's expression.
        self.last = dict.fromkeys(results, len(self.order))
        for place, node in reversed(list(enumerate(self.order))):
            read_at = max(place, self.last.get(node, 0)) if self.uses[node] == 1 and node not in self.by_name else place
            for one in nodes_in((node.args, node.kwargs)):
                self.users.setdefault(one, []).append(node)
                self.last[one] = max(read_at, self.last.get(one, 0))
        self.places: dict[Node | None, int] = {node: place for place, node in enumerate(self.order)}
        self.written: dict[Node, tuple[str, int]] = {}
        self.assigned: set[Node] = set()
        self.taken: dict[str, Node | None] = dict.fromkeys(self.functions.reserved)
        lines: list[str] = []
        for node in results[:named]:
            if node.op != "input":
                self.taken[node.names[0]] = node
        for node in self.graph.parameters.values():
            self.written[node] = node.names[0], ATOM
            self.taken[node.names[0]] = node
            if self.graph.outer is None:
                self.ends.add(node)
        section = None
        # A sum or a maximum stands where it is handed back; so does what a function of one expression returns.
        at_end = set(results[named:] if self.graph.outer is None else results if len(results) == 1 else ())
        for place, node in enumerate(self.order):
            new = sections(node)
            if node.op == "item":
                continue
            several = [n for n in self.order if n.op == "item" and n.args[0] is node]
            if (node.op == "call" and node.args[0].several) or several:
                text = self.text(node)[0]
                count = len(node.value)
                targets = ["_"] * count
                for one in several:
                    targets[one.args[1]] = self._name(one, place)
                left, right = ", ".join(targets), text
            else:
                text, binds = self.text(node)
                fits = len(text) < 84 or self.graph.outer is not None
                if self._inlined(node, text) or (node in at_end and self.uses[node] == 1 and fits):
                    self.written[node] = text, binds
                    continue
                left, right = self._name(node, place), text
            if new is not None and new != section:
                lines += ([""] if lines else []) + [f"# {one}" for one in textwrap.wrap(new, WIDTH - 8)]
                section = new
            lines += fitted(f"{left} = {right}")
            self.assigned.add(node)
        return lines

    def _inlined(self, node: Node, text: str) -> bool:
        if node.op in ("input", "constant"):
            return True
        if node in self.by_name:
            return False
        return self.uses[node] == 1 and len(text) <= (
            36 if self._names(node, strong=True) and node.op != "__invert__" else 84
        )

    def _names(self, node: Node, strong: bool = False) -> list[str]:
        """Names that tell something; without `strong`, also of functions and of what it is made of."""
        good = [name for name in node.names if name not in POOR]
        if strong:
            return good
        poor = not good or node.names[0] in POOR
        if poor and node.op == "where" and isinstance(node.args[1], Node) and "neg" in node.args[1].op:
            return self._names(node.args[1])
        of = self._names(node.args[0])[:1] if node.args and isinstance(node.args[0], Node) else []
        if of and not good and "neg" in node.op:
            return [DERIVED[node.op].format(*of)]
        good += [name for name in node.function_names if name not in POOR and name not in good]
        if node.op == "index_select" and isinstance(node.args[0], Node) and self._names(node.args[0]):
            return [f"{self._names(node.args[0])[0]}_of_token"]
        if not good and of and node.op in DERIVED:
            return [DERIVED[node.op].format(*of)]
        if not good and node.op in ("__ge__", "ge", "__le__", "le") and isinstance(node.args[1], float):
            bound = self.number(node.args[1], node).removeprefix("LOG_").removesuffix("_F32")
            good = [f"meets_{bound.lower()}"] if bound.isidentifier() else []
        if not good and node.op == "where" and isinstance(node.args[1], Node):
            good = self._names(node.args[1])
        return good

    def _name(self, node: Node, place: int) -> str:
        candidates = self._names(node) + [name for name in node.names if name in POOR - EMPTY]
        fallback = node.args[0].name.strip("_") if node.op == "call" else node.op.strip("_")
        fallback = FALLBACKS.get(fallback, fallback)
        for name in candidates or [fallback]:
            holder = self.taken.get(name, node)
            if holder is node or (holder in self.written and self._free(holder, node)):
                break
            # A result that comes later may have its name from here on.
            if holder in self.places and holder not in self.written and self.last[node] <= self.places[holder]:
                break
        else:
            name, number = (candidates or [fallback])[0], 2
            while self.taken.get(f"{name}_{number}", node) is not node:
                number += 1
            name = f"{name}_{number}"
        self.taken[name] = node
        self.written[node] = name, ATOM
        return name

    def _free(self, holder: Node, node: Node) -> bool:
        """Nothing reads a value after the statement that makes a node."""
        return holder not in self.ends and all(
            user is node
            or user in self.assigned
            or user in node.args
            or (user in self.written and self._free(user, node))
            for user in self.users.get(holder, ())
        )

    def result(self, node: Node) -> str:
        """The text of a result, once the body is written."""
        return self.written[node][0] if node in self.written else self.text(node)[0]

    def text(self, node: Node) -> tuple[str, int]:
        """An operation as an expression, and how tightly it binds."""
        if node in self.written:
            return self.written[node]
        args, kwargs = list(node.args), dict(node.kwargs)
        if node.op == "constant":
            value, dtype = args
            return f"torch.tensor({value}, dtype={dtype}, device={self.names.device})", ATOM
        if node.op == "call":
            function = args[0]
            return f"{function.name}({', '.join(self.one(x, node)[0] for x in args[1:])})", ATOM
        if node.op == "item":
            text, binds = self.text(args[0])
            return f"{text}[{args[1]}]", ATOM
        if node.op in INFIX and len(args) == 2 and not kwargs:
            sign, binds = INFIX[node.op]
            left, right = (self.one(x, node) for x in (args[::-1] if node.op in SWAPPED else args))
            comparing = binds == 0
            left_text = left[0] if left[1] > binds or (left[1] == binds and not comparing) else f"({left[0]})"
            right_text = right[0] if right[1] > binds else f"({right[0]})"
            return f"{left_text} {sign} {right_text}", binds
        if node.op in PREFIX and len(args) == 1:
            sign, binds = PREFIX[node.op]
            text, inner = self.one(args[0], node)
            return f"{sign}{text if inner >= binds else f'({text})'}", binds
        if node.op == "__getitem__":
            text, inner = self.one(args[0], node)
            return f"{text if inner == ATOM else f'({text})'}[{self._index(args[1])}]", ATOM
        if node.op == "to" and node.where and node.where[-1].co_name == "_result":
            args[1] = _Text(self.names.mask_dtype)
        rest = [f"{key}={self.one(x, node)[0]}" for key, x in kwargs.items()]
        if node.op in FUNCTIONS or not args or not isinstance(args[0], Node):
            every = [self.one(x, node)[0] for x in args] + rest
            return f"torch.{node.op}({', '.join(every)})", ATOM
        text, inner = self.one(args[0], node)
        if node.op == "clamp" and len(args) == 3 and args[1] is None:
            rest, args = [f"max={self.one(args[2], node)[0]}"], args[:1]
        every = [self.one(x, node)[0] for x in args[1:]] + rest
        return f"{text if inner == ATOM else f'({text})'}.{node.op}({', '.join(every)})", ATOM

    def _index(self, x: Any) -> str:
        if isinstance(x, tuple):
            return ", ".join(map(self._index, x))
        if isinstance(x, slice):
            ends = ["" if end is None else self.one(end, None)[0] for end in (x.start, x.stop)]
            return f"{ends[0]}:{ends[1]}"
        return "..." if x is Ellipsis else self.one(x, None)[0]

    def one(self, x: Any, node: Node | None) -> tuple[str, int]:
        """An argument as text."""
        if isinstance(x, Node):
            return self.text(x)
        if isinstance(x, _Text):
            return x.text, ATOM
        if isinstance(x, torch.Size):
            if x == self.names.shape[0]:
                return self.names.shape[1], ATOM
            return f"({', '.join(self.one(one, node)[0] for one in x)}{',' if len(x) == 1 else ''})", ATOM
        if isinstance(x, bool) or x is None or isinstance(x, (str, torch.dtype)):
            return repr(x) if not isinstance(x, str) else f'"{x}"', ATOM
        if isinstance(x, int):
            return self.size(x), ATOM
        if isinstance(x, float):
            text = self.number(x, node)
            return text, 3 if " - " in text else 4 if " " in text else ATOM if x >= 0 else 5
        if isinstance(x, torch.device):
            return self.names.device, ATOM
        if isinstance(x, (tuple, list)):
            inner = ", ".join(self.one(one, node)[0] for one in x)
            return (f"[{inner}]" if isinstance(x, list) else f"({inner}{',' if len(x) == 1 else ''})"), ATOM
        raise CannotEject(f"an argument that has no text: {x!r}")

    def size(self, x: int) -> str:
        """A whole number; a size of the example by its name."""
        if x in self.names.sizes:
            if self.graph.outer is None:
                return self.names.sizes[x]
            for node in self.graph.parameters.values():
                if isinstance(node.value, Tensor):
                    for dim, found in enumerate(node.value.shape):
                        for more in (0, 1):
                            if found - more == x:
                                return f"{node.names[0]}.shape[{dim}]" + (f" - {more}" if more else "")
            raise CannotEject(f"no argument of {self.graph.code} has the size {x}")
        return repr(x)

    def number(self, x: float, node: Node | None) -> str:
        """A number, by its name where it has one."""
        if x != x:
            return "torch.nan"
        if x in (float("inf"), -float("inf")):
            return "torch.inf" if x > 0 else "-torch.inf"
        for code in reversed(node.where) if node is not None and abs(x) not in (0.5, 1.0, 2.0) else ():
            for factor in ("", "2.0 * "):
                named = self.functions.constant(code, abs(x) / (2.0 if factor else 1.0))
                if named is not None:
                    return ("" if x >= 0 else "-") + factor + named
        if (
            x
            and not float(x).is_integer()
            and 1.0 / x > 2
            and 1.0 / round(1.0 / x) == x
            and self.graph.outer is not None
        ):
            return f"1 / {round(1.0 / x)}"
        if (
            node is not None
            and self.graph.outer is None
            and isinstance(x, float)
            # 0 and 1 fill in what there is not, though a bound may be as large.
            and (node.op not in ("full", "where") or x not in (0.0, 1.0))
            and (node.op in ("clamp", "full", "where") or INFIX.get(node.op, ("", 9))[1] == 0)
        ):
            deciding = any(code.co_name.startswith("decide") for code in node.where)
            names = sorted(self.names.numbers, key=lambda name: ("WEIGHT" in name) == deciding)
            for name in names:
                if x == self.names.numbers[name] and (node.op == "clamp" or " " not in name):
                    return name
            for name in names:
                if x == -self.names.numbers[name] and " " not in name:
                    return f"-{name}"
        return repr(x)


@dataclass(frozen=True)
class _Text:
    """An argument as it is written."""

    text: str


def _all_true(node: Node) -> bool:
    return (node.op == "ones_like" and node.kwargs.get("dtype") == torch.bool) or (
        node.op == "ones" and node.kwargs.get("dtype") == torch.bool
    )


def _unexpanded(node: Node) -> tuple[Any, ...]:
    """The arguments of an operation that broadcasts, without `expand` where the others give its shape."""
    found = list(node.args)
    for place, x in enumerate(found):
        if isinstance(x, Node) and x.op == "expand":
            given = [*found[:place], x.args[0], *found[place + 1 :]]
            if torch.broadcast_shapes(*(one.value.shape for one in nodes_in(given))) == node.value.shape:
                found = given
    return tuple(found)


def _is_never(x: Any) -> bool:
    """Bools that are False whatever is compared."""
    if not isinstance(x, Node) or len(x.args) != 2:
        return False
    return (x.op, x.args[1]) in (("gt", math.inf), ("__gt__", math.inf), ("lt", -math.inf), ("__lt__", -math.inf))


def _of_never(node: Node) -> Node | None:
    """Simplify an operation on bools that are all False; None: it has none of them."""
    if node.op == "where":
        return node.args[2] if _is_never(node.args[0]) and isinstance(node.args[2], Node) else None
    for one, other in (node.args, node.args[::-1]):
        if _is_never(one) and isinstance(other, Node) and other.value.shape == node.value.shape:
            found = one if node.op == "__and__" else other
            assert isinstance(found, Node)
            return found
    return None


def _key(x: Any) -> Any:
    if isinstance(x, (tuple, list)):
        return tuple(map(_key, x))
    if isinstance(x, dict):
        return tuple((key, _key(one)) for key, one in sorted(x.items()))
    if isinstance(x, slice):
        return "slice", _key(x.start), _key(x.stop)
    if isinstance(x, (bool, int, float)):
        return type(x), repr(x)
    return x


@dataclass(eq=False)
class Function:
    """A function of the written source."""

    name: str
    source: str
    several: bool


class Functions:
    """The functions and constants that the written bodies refer to; functions find their sizes in their arguments."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.every: dict[str, Function] = {}
        # Their values, and the comments above their definitions.
        self.constants: dict[str, tuple[float, list[str]]] = {}
        self.reserved: set[str] = {"torch", "math", "logging", "inf"}

    def of(self, graph: Graph) -> Function:
        """Write a kept function, once for every body."""
        assert graph.code is not None
        writer = Writer(graph, self.names, self)
        results = writer.prepare(list(graph.results))
        body = writer.body(results)
        returned = ", ".join(map(writer.result, results))
        code = graph.code
        base = code.co_name.strip("_")
        parameters = ", ".join(f"{node.names[0]}: torch.Tensor" for node in graph.parameters.values())
        gives = f"tuple[{', '.join(['torch.Tensor'] * len(results))}]" if graph.several else "torch.Tensor"
        doc = _docstring(code)
        text = [f") -> {gives}:", *([f'    """{doc}"""'] if doc else []), *("    " + line for line in body),
                *("    " + line for line in fitted(f"return {returned}"))]  # fmt: skip
        source = f"({parameters}" + "\n".join(text)
        if source in self.every:
            return self.every[source]
        base = NAMES.get((code.co_qualname if hasattr(code, "co_qualname") else base), base)
        taken = {function.name for function in self.every.values()}
        name, number = f"_{base}", 2
        while name in taken:
            name, number = f"_{base}_{number}", number + 1
        function = Function(name, f"def {name}{source}", graph.several)
        self.every[source] = function
        self.reserved.add(name)
        return function

    def constant(self, code: Any, x: float) -> str | None:
        """The name of a number that a function takes from a constant of its module."""
        owner = inspect.getmodule(code)
        for name in code.co_names:
            if name.isupper() and owner is not None and getattr(owner, name, None) == x:
                self.constants.setdefault(name, (x, _comment_above(owner, name)))
                return name
        return None


def _comment_above(module: ModuleType, name: str) -> list[str]:
    """The comment above the definition of a constant, in the module that defines it."""
    for owner in (module, *(x for key, x in sys.modules.items() if key.startswith(DEFINITION))):
        lines = inspect.getsource(owner).splitlines()
        place = next((i for i, line in enumerate(lines) if re.match(rf"(\w+, )*{name}\b[^(]* = ", line)), None)
        if place is not None:
            first = place
            while lines[first - 1].startswith("#"):
                first -= 1
            return lines[first:place]
    return []


# Methods whose name alone says too little.
NAMES = {
    "Packed.sum": "sum_by_sequence",
    "Packed.max": "max_by_sequence",
    "Packed.sum_integers": "count_by_sequence",
    "_differences": "count_by_sequence",
}


def _docstring(code: Any) -> str | None:
    """The first paragraph of the docstring of a function."""
    if not code.co_consts or not isinstance(code.co_consts[0], str):
        return None
    first = inspect.cleandoc(code.co_consts[0]).split("\n\n")[0]
    return " ".join(first.split())
