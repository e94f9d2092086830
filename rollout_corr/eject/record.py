"""Recording what a function does to tensors, as a graph of operations that can be written as source.

The definition reads no value on the host, so one run under a `Recorder` is the whole program of a Spec: Python has
executed the branches that the Spec decides, and only operations on tensors are left. Local variables of the
definition's own frames give them their names. `KEPT` functions become functions of the written source.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# What reads a value on the host: no program of tensors can have it.
READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "numpy", "is_nonzero", "equal"}
# Questions about a tensor whose answer is part of the example's shape, dtype or device.
METADATA = {"__get__", "dim", "numel", "size", "is_floating_point", "is_complex", "__len__", "stride", "element_size",
            "is_contiguous", "ndimension", "__hash__", "requires_grad_"}  # fmt: skip


class CannotEject(ValueError):
    """A request that no single file can carry out; the message says why."""


@dataclass(eq=False)
class Node:
    """An input, an operation, or one of several results of one."""

    op: str  # the operation, "input", "constant", "call" of a kept function, or "item" of several results
    args: tuple[Any, ...]  # with nodes in place of tensors
    kwargs: dict[str, Any]
    graph: Graph
    where: tuple[CodeType, ...]  # the functions of the package that were running, outermost first
    value: Any  # the example's value
    names: list[str] = field(default_factory=list)  # local names that its value had, in order
    function_names: list[str] = field(default_factory=list)  # the functions that returned it

    def inputs(self) -> Iterator[Node]:
        """The nodes that it reads."""
        yield from nodes_in((self.args, self.kwargs))


def nodes_in(x: Any) -> Iterator[Node]:
    """All nodes in nested arguments."""
    if isinstance(x, Node):
        yield x
    elif isinstance(x, (tuple, list)):
        for one in x:
            yield from nodes_in(one)
    elif isinstance(x, dict):
        for one in x.values():
            yield from nodes_in(one)


@dataclass(eq=False)
class Graph:
    """The operations of a function, in order."""

    code: CodeType | None  # the function; None: the whole
    outer: Graph | None
    parameters: dict[int, Node] = field(default_factory=dict)  # its inputs
    nodes: list[Node] = field(default_factory=list)  # its operations
    results: list[Node] = field(default_factory=list)
    several: bool = False  # it returns a tuple


class Recorder(TorchFunctionMode):
    """Records operations while it is entered; those on a stack of tensors alike are recorded row by row.

    Functions in `kept` stay functions; local variables of modules whose names begin as in `own` give names.
    """

    def __init__(self, kept: Sequence[Callable[..., Any]], own: tuple[str, ...]) -> None:
        super().__init__()
        self.kept = {function.__code__: function for function in kept}
        self.own = own
        self.graph = Graph(None, None)
        self.known: dict[int, tuple[Tensor, Node]] = {}
        self.rows: dict[int, tuple[Tensor, list[Node]]] = {}
        self.alive: list[Any] = []
        self._calls: list[tuple[FrameType, dict[str, Any]]] = []
        self._trace_before: Any = None

    # --- nodes ---

    def input(self, name: str, value: Tensor) -> Tensor:
        """Name an input of the program."""
        node = Node("input", (name,), {}, self.graph, (), value, [name])
        self.graph.parameters[id(node)] = node
        self.known[id(value)] = value, node
        return value

    def node_of(self, x: Tensor) -> Node:
        """The node of a tensor, as the current graph sees it."""
        if id(x) in self.known:
            return self._seen_from(self.graph, self.known[id(x)][1])
        if x.numel() > 64:
            raise CannotEject(f"the definition used a tensor of {list(x.shape)} that is no argument")
        return self._put(Node("constant", (x.tolist(), x.dtype), {}, self.graph, (), x), x)

    def _seen_from(self, graph: Graph, node: Node) -> Node:
        if node.graph is graph:
            return node
        path, at = [], graph
        while at is not node.graph:
            if at.outer is None:
                raise CannotEject(f"a value of a kept function was used outside of it: {node.op} {node.names}")
            path.append(at)
            at = at.outer
        for inner in reversed(path):
            key = id(node)
            if key not in inner.parameters:
                given = Node("input", (node,), {}, inner, (), node.value, list(node.names))
                inner.parameters[key] = given
            node = inner.parameters[key]
        return node

    def _put(self, node: Node, value: Tensor) -> Node:
        self.graph.nodes.append(node)
        self.known[id(value)] = value, node
        self.alive.append(value)
        return node

    def _where(self) -> tuple[CodeType, ...]:
        found = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith(self.own):
                found.append(frame.f_code)
            frame = frame.f_back
        return tuple(reversed(found))

    # --- operations ---

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in METADATA:
            return func(*args, **kwargs)
        if name in READS:
            raise CannotEject(f"the definition reads a value on the host: {name}")
        if name in ("__set__", "__setitem__", "copy_", "set_"):
            raise CannotEject(f"the definition writes in place: {name}")
        # Arguments first: the operation may overwrite them.
        where = self._where()
        arguments, named = self._with_nodes(args), self._with_nodes(kwargs)
        by_row = self._by_row(name, args, kwargs, where)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            if by_row is not None and not (isinstance(by_row, list) and name == "unbind"):
                self.rows[id(result)] = result, by_row
            if any(result is x for x in args) and not name.endswith("_") and not name.startswith("__i"):
                return result
            self._put(Node(name.rstrip("_") if not name.startswith("__") else name, arguments, named, self.graph,
                           where, result), result)  # fmt: skip
        elif isinstance(result, (tuple, list)) and any(isinstance(x, Tensor) for x in result):
            if by_row is not None:
                for one, row in zip(result, by_row, strict=True):
                    self.known[id(one)] = one, row
                    self.alive.append(one)
                return result
            several = Node(name, arguments, named, self.graph, where, tuple(result))
            self.graph.nodes.append(several)
            for place, one in enumerate(result):
                self._put(Node("item", (several, place), {}, self.graph, where, one), one)
        return result

    def _with_nodes(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.node_of(x)
        if isinstance(x, (tuple, list)) and not isinstance(x, torch.Size):
            return tuple(map(self._with_nodes, x)) if isinstance(x, tuple) else [self._with_nodes(one) for one in x]
        if isinstance(x, dict):
            return {key: self._with_nodes(one) for key, one in x.items()}
        return x

    # --- stacks of rows ---

    def _by_row(self, name: str, args: Any, kwargs: Any, where: tuple[CodeType, ...]) -> list[Node] | None:
        """The rows of a stack, each by an operation of its own; None: the operation makes none."""
        if name in ("stack", "cat") and not kwargs and len(args) == 1:
            if all(id(x) in self.rows for x in args[0]):
                return [row for x in args[0] for row in self.rows[id(x)][1]]
            shapes = {x.shape for x in args[0]}
            if len(shapes) == 1 and len(next(iter(shapes))) == (1 if name == "cat" else len(next(iter(shapes)))):
                dtype = torch.result_type(*args[0][:2]) if len(args[0]) == 2 else None
                for x in args[0]:
                    dtype = x.dtype if dtype is None else torch.promote_types(dtype, x.dtype)
                return [self._row("to", (self.node_of(x), dtype), {}, where, x.to(dtype)) if x.dtype != dtype
                        else self.node_of(x) for x in args[0]]  # fmt: skip
            return None
        stacked = [x for x in args if isinstance(x, Tensor) and id(x) in self.rows]
        if name == "__getitem__" and isinstance(args[0], Tensor):
            if id(args[0]) in self.rows and isinstance(args[1], slice):
                return self.rows[id(args[0])][1][args[1]]
            if args[1] is None and args[0].dim() == 1:
                return [self.node_of(args[0])]
        if not stacked:
            return None
        many = len(self.rows[id(stacked[0])][1])
        if name in ("unbind", "view") and stacked[0] is args[0]:
            return self.rows[id(args[0])][1]
        if name in ("sum", "__rsub__") or name.rstrip("_") in (
            "neg", "div", "abs", "clamp", "exp", "expm1", "mul", "double", "where", "sum", "to"
        ):  # fmt: skip
            found = []
            for place in range(many):
                row = tuple(self.rows[id(x)][1][place] if isinstance(x, Tensor) and id(x) in self.rows
                            else self._with_nodes(x) for x in args)  # fmt: skip
                values = tuple(x.value if isinstance(x, Node) else x for x in row)
                if name == "sum":
                    row, values = row[:1], values[:1]
                value = torch.where(*values) if name == "where" else getattr(values[0].clone(), name)(
                    *values[1:], **kwargs)  # fmt: skip
                found.append(self._row(name.rstrip("_"), row, self._with_nodes(kwargs), where, value))
            return found
        return None

    def _row(self, op: str, args: Any, kwargs: Any, where: tuple[CodeType, ...], value: Tensor) -> Node:
        node = Node(op, tuple(args), dict(kwargs), self.graph, where, value)
        self.graph.nodes.append(node)
        self.alive.append(value)
        return node

    # --- frames: names, and kept functions ---

    def __enter__(self) -> Recorder:
        self._trace_before = sys.gettrace()
        super().__enter__()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *failed: Any) -> None:
        sys.settrace(self._trace_before)
        super().__exit__(*failed)

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith(self.own):
            return None
        if frame.f_code in self.kept:
            self.graph = Graph(frame.f_code, self.graph)
            self._calls.append((frame, dict(frame.f_locals)))
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, result: Any) -> Any:
        code = frame.f_code
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name, x in frame.f_locals.items():
            if isinstance(x, Tensor) and id(x) in self.known and self.known[id(x)][0] is x:
                self._name(self.known[id(x)][1], name, weak=name in given and code not in self.kept)
        if event == "return":
            if isinstance(result, Tensor) and id(result) in self.known and frame.f_code.co_name.isidentifier():
                self._name(self.known[id(result)][1], frame.f_code.co_name, weak=True)
            if self._calls and self._calls[-1][0] is frame:
                self._leave(result)
        return self._on_line

    def _name(self, node: Node, name: str, weak: bool = False) -> None:
        names = node.function_names if weak else node.names
        if name not in names and not name.startswith("_"):
            names.append(name)

    def _leave(self, result: Any) -> None:
        _, before = self._calls.pop()
        inner, outer = self.graph, self.graph.outer
        assert outer is not None
        several = isinstance(result, tuple)
        results = list(result) if several else [result]
        inner.results, inner.several = [self.node_of(x) for x in results], several
        for name, x in before.items():
            if isinstance(x, Tensor) and id(x) in self.known:
                for parameter in inner.parameters.values():
                    if parameter.value is x:
                        parameter.names = [name]
        self.graph = outer
        # What the caller handed in, in its own graph.
        given = tuple(self._seen_from(outer, node.args[0]) for node in inner.parameters.values())
        code = inner.code
        call = Node("call", (inner, *given), {}, outer, (code,) if code else (), result)
        self.graph.nodes.append(call)
        if not several:
            self.known[id(result)] = result, call
            self.alive.append(result)
            return
        for place, one in enumerate(results):
            self._put(Node("item", (call, place), {}, outer, (), one), one)
