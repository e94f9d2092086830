"""The Triton part of a file: the kernels of `correct`, specialized to one Spec, and their launches."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import Counter
from typing import Any

import triton.language as tl

from ..backends.operators import beyond_kernels
from ..kernels.correct.apply import apply_kernel
from ..kernels.correct.decide import decide_kernel
from ..kernels.correct.plan import Plan
from ..kernels.correct.planner import numbers_of, plan_of
from ..kernels.correct.read import read_kernel
from ..kernels.grid import SHAPES, Shape
from ..kernels.partials import groups, kept_maxima
from ..kernels.tiles import Tiling
from ..metrics import schema
from ..specs.correction import Spec
from .program import power
from .record import CannotEject
from .specialize import Dyn, Kernel, Specializer, UsesMissing, has_effect, name, names_in, unparsed
from .write import fitted

# Functions that stay functions though a plan decides some of them.
KEPT = (
    "owner_before", "exponential", "end_of", "zero_rejected", "add_up_part", "is_last", "add_up_neighbors",
    "k3_in_full", "places_of",
)  # fmt: skip
# 2,048 tokens of a program of one warp, four neighbors to a thread.
TILING = Tiling(parts=1, lanes=32, vec=4, unit=True, aligned=True)
SHAPE: Shape = dataclasses.replace(SHAPES[1][1], chunk=2)


# Maxima of token weights, and those of D that they follow from.
DERIVED, FROM = ("max_raw", "-min_raw", "max_weight", "-min_weight"), ("max_d", "-min_d")


class Pruned(Plan):
    """A plan without the columns that nothing reads."""

    @property
    def derived(self) -> int:
        """The maxima of token weights that follow from those of D: all of them, or none."""
        return super().derived if DERIVED[0] in self.token_maxima else 0

    __hash__ = Plan.__hash__


def completed(spec: Spec, numbers: tuple[str, ...]) -> tuple[str, ...]:
    """The statistics that the kernels find together with some of them."""
    if spec.weighs_tokens and set(DERIVED) & set(numbers):
        found = {*numbers, *DERIVED, *FROM}
        return tuple(name for part in schema.layout(spec) for name in part if name in found)
    return numbers


def plan_for(spec: Spec, numbers: tuple[str, ...], more: frozenset[str] = frozenset()) -> Plan:
    """The plan of a Spec for a packed batch with a mask, with the columns of some statistics alone.

    Args:
        spec: The Spec.
        numbers: The statistics.
        more: Further columns that turned out to be needed.
    """
    whole = plan_of(
        spec, double=False, advantages=None, packed=True, masked=True, writes_weights=spec.returns_weights,
        writes_mask=spec.edits_mask, edits_mask=spec.edits_mask, mass=None,
    )  # fmt: skip
    names = iter([name for part in schema.layout(spec) for name in part])
    kept = {
        table: tuple(column for column in getattr(whole, table) if next(names) in numbers or column in more)
        for table in OF_BATCH
    }
    needed = {"differing"} & more
    kept["counts"] = tuple(one for one in whole.counts if one not in NEVER or one in needed or one in more)
    kept["floats"] = tuple(one for one in whole.floats if one not in NEVER or one in more)
    fields = {one.name: getattr(whole, one.name) for one in dataclasses.fields(whole)}
    return Pruned(**fields | kept)


OF_BATCH = ("token_sums", "sequence_sums", "call_sums", "token_maxima", "sequence_maxima", "call_maxima")
TABLES = ("counts", "integers", "floats", "peaks")
# Columns of slots that few statistics need.
NEVER = ("differing", "train", "rollout", "ratio_m1", "weight_m1")


def pointer(text: str, dtype: Any) -> Dyn:
    """A parameter that points to elements."""
    return Dyn(name(text), dtype, (), True)


def element(of: str) -> str:
    """The dtype that a pointer points to, where the caller decides."""
    return f"{of}.dtype.element_ty"


def arguments_of(kernel: Any, plan: Plan) -> dict[str, Any]:
    """The arguments of a kernel: pointers and sizes are left, the plan is known."""
    pointers = {
        "train_logp": element("train_logp"), "rollout_logp": element("rollout_logp"), "mask": element("mask"),
        "offsets": element("offsets"), "weights": tl.float32, "mask_out": element("mask"), "counts": tl.int32,
        "integers": tl.int64, "floats": tl.float32, "peaks": tl.int32, "token_sums": tl.float64,
        "token_maxima": tl.float64, "part_sums": tl.float64, "part_maxima": tl.float64, "sequence_sums": tl.float64,
        "sequence_maxima": tl.float64, "counter": tl.int32, "keep_out": tl.int8, "states": tl.int32,
        "sequence_weights": tl.float32, "statistics": tl.float64,
    }  # fmt: skip
    absent = {"log_mass", "advantages", "histogram", "within", "keep_turns_out"}
    absent |= {table for table in ("integers", "floats", "peaks") if not getattr(plan, table)}
    if not plan.writes_weights:
        absent.add("weights")
    if not plan.writes_mask:
        absent.add("mask_out")
    found: dict[str, Any] = {"PLAN": plan, "TILING": TILING, "SHAPE": SHAPE, "BY_OWNER": False, "externals": (),
                             "numbers": "numbers", "width": 0, "tiles": 0}  # fmt: skip
    for parameter, annotation in kernel.fn.__annotations__.items():
        if parameter in found or parameter == "return":
            continue
        if parameter in absent:
            found[parameter] = None
        elif parameter in pointers:
            found[parameter] = pointer(parameter, pointers[parameter])
        elif parameter.endswith(("_row", "_step")):
            found[parameter] = 1
        else:
            found[parameter] = Dyn(name(parameter), tl.int64 if "int64" in annotation else tl.int32)
    return {key: found[key] for key in kernel.fn.__annotations__ if key != "return"}


def label_of(plan: Plan) -> Any:
    """Names of the accumulators."""

    def label(hint: str, value: tuple[Any, ...]) -> list[str] | None:
        if len(value) == len(plan.recorded) and hint in ("found", "kept", "more", "fresh"):
            return [f"{'' if hint == 'found' else 'kept_'}{column.replace('-', '')}" for _, column in plan.recorded]
        if hint in TABLES and len(value) == len(getattr(plan, hint)):
            return [f"sum_{re.sub('^[0-9]+/', '', column)}" for column in getattr(plan, hint)]
        return None

    return label


def kernels_of(spec: Spec, numbers: tuple[str, ...]) -> tuple[list[Kernel], Specializer, Plan]:
    """The kernels of a Spec, in the order of their launches, and the functions that they call."""
    more: frozenset[str] = frozenset()
    while True:
        plan = plan_for(spec, numbers, more)
        values = tuple(numbers_of(spec, plan.double).values())
        specializer = Specializer(KEPT, {"thresholds": lambda values=values, **_: values}, label_of(plan), cleaned)
        try:
            kernels = [
                specializer.specialized(kernel, arguments_of(kernel, plan), top=True)
                for kernel in (read_kernel, decide_kernel, *([apply_kernel] if plan.applies else []))
            ]
            columns = {one for table in OF_BATCH for one in getattr(plan, table)}
            if lost := columns - specializer.stored - {*DERIVED}:
                raise CannotEject(f"spec: the specialized kernels would not store {sorted(lost)}")
            return kernels, specializer, plan
        except UsesMissing as missing:
            column = str(missing)
            if column in more:
                raise
            more |= {column}


# --- cleaning ---


def reads_memory(node: ast.AST) -> bool:
    """An expression that loads."""
    return any(isinstance(one, ast.Call) and unparsed(one.func) == "tl.load" for one in ast.walk(node))


def cleaned(body: list[ast.stmt], effective: set[str]) -> list[ast.stmt]:
    """Statements without what nothing reads; what is read once stands where it is read."""
    while True:
        before = unparsed(ast.Module(body, []))
        body = without_dead(body, effective)
        body = Inliner(body, effective).run()
        if unparsed(ast.Module(body, [])) == before:
            return body


def targets_of(statement: ast.Assign) -> list[str]:
    """The variables that an assignment sets."""
    target = statement.targets[0]
    return [one.id for one in (target.elts if isinstance(target, ast.Tuple) else [target]) if isinstance(one, ast.Name)]


def without_dead(body: list[ast.stmt], effective: set[str]) -> list[ast.stmt]:
    """Leave out assignments that nothing reads, until there is none."""
    live: set[str] = set()

    def reads(block: list[ast.stmt]) -> None:
        for s in block:
            if isinstance(s, ast.Assign):
                if has_effect(s.value, effective) or any(one in live for one in targets_of(s)):
                    live.update(names_in(s.value))
            elif isinstance(s, (ast.If, ast.While)):
                live.update(names_in(s.test))
                reads(s.body)
                reads(s.orelse)
            elif isinstance(s, ast.For):
                live.update(names_in(s.iter))
                reads(s.body)
            else:
                live.update(names_in(s))

    size = -1
    while size != len(live):
        size = len(live)
        reads(body)

    def kept(block: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for s in block:
            if isinstance(s, ast.Assign):
                targets = targets_of(s)
                if not any(one in live for one in targets) and not has_effect(s.value, effective):
                    continue
                if not any(one in live for one in targets):
                    found.append(ast.Expr(s.value))
                    continue
                if isinstance(s.targets[0], ast.Tuple) and isinstance(s.value, ast.Tuple):
                    pairs = [(t, v) for t, v in zip(targets, s.value.elts, strict=True) if t in live]
                    if len(pairs) < len(targets):
                        if len(pairs) == 1:
                            found.append(ast.Assign([ast.Name(pairs[0][0], ast.Store())], pairs[0][1]))
                        else:
                            found.append(ast.Assign(
                                [ast.Tuple([ast.Name(t, ast.Store()) for t, _ in pairs], ast.Store())],
                                ast.Tuple([v for _, v in pairs], ast.Load()),
                            ))  # fmt: skip
                        continue
                found.append(s)
            elif isinstance(s, ast.If):
                body, orelse = kept(s.body), kept(s.orelse)
                if body or orelse:
                    if not body:
                        found.append(ast.If(ast.UnaryOp(ast.Not(), s.test), orelse, []))
                    else:
                        found.append(ast.If(s.test, body, orelse))
            elif isinstance(s, ast.For):
                inner = kept(s.body)
                if inner:
                    found.append(ast.For(s.target, s.iter, inner, []))
            elif isinstance(s, ast.While):
                found.append(ast.While(s.test, kept(s.body), []))
            else:
                found.append(s)
        return found

    return kept(body)


class Inliner:
    """Writes what is read once where it is read, and copies as what they copy."""

    def __init__(self, body: list[ast.stmt], effective: set[str]) -> None:
        self.body, self.effective = body, effective
        self.reads = names_in(body)
        self.set: Counter[str] = Counter()
        for s in ast.walk(ast.Module(body, [])):
            if isinstance(s, ast.Name) and isinstance(s.ctx, ast.Store):
                self.set[s.id] += 1

    def run(self) -> list[ast.stmt]:
        """Give the statements."""
        return self.block(self.body)

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Go through a block: an assignment is written into the statement that reads it, if nothing between matters."""
        result = list(body)
        place = 0
        while place < len(result):
            s = result[place]
            if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name) and self.moves(s):
                target, value = s.targets[0].id, s.value
                where = next((i for i in range(place + 1, len(result)) if names_in(result[i])[target]), None)
                if where is not None and self.reaches(result, place, where, target, value):
                    result[where] = Put(target, value).visit(result[where])
                    ast.fix_missing_locations(result[where])
                    del result[place]
                    # Whatever the value reads is still read once for each time.
                    place = max(place - 1, 0)
                    continue
            place += 1
        done = []
        for s in result:
            if isinstance(s, (ast.If, ast.While, ast.For)):
                s.body = self.block(s.body)
                s.orelse = self.block(s.orelse)
            done.append(s)
        return done

    def moves(self, s: ast.Assign) -> bool:
        target = s.targets[0]
        assert isinstance(target, ast.Name)
        if self.set[target.id] != 1 or has_effect(s.value, self.effective):
            return False
        if isinstance(s.value, (ast.Name, ast.Constant)):
            return all(self.set[one] <= 1 for one in names_in(s.value)) or self.reads[target.id] == 1
        if isinstance(s.value, ast.UnaryOp) and isinstance(s.value.operand, ast.Constant):
            return True
        return self.reads[target.id] == 1 and len(unparsed(s.value)) < 70

    def reaches(self, block: list[ast.stmt], place: int, where: int, target: str, value: ast.expr) -> bool:
        """Nothing between changes the value, and it is not read in a loop that would compute it again."""
        copies = isinstance(value, (ast.Name, ast.Constant, ast.UnaryOp))
        user = block[where]
        if isinstance(user, (ast.For, ast.While, ast.If)):
            if isinstance(user, ast.While) or not isinstance(value, (ast.Name, ast.Constant, ast.UnaryOp)):
                head = user.iter if isinstance(user, ast.For) else user.test
                if isinstance(user, ast.While) or names_in(head)[target] == 0:
                    return False
        elif not copies and len(unparsed(user)) + len(unparsed(value)) > 110:
            return False
        if self.reads[target] > 1 and not copies:
            return False
        changed = set()
        for s in block[place + 1 : where + 1]:
            if s is user and isinstance(s, ast.Assign):
                continue
            for one in ast.walk(s):
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                    changed.add(one.id)
        if changed & set(names_in(value)):
            return False
        if copies and self.reads[target] > 1:
            later = [one for s in block[where + 1 :] for one in ast.walk(s)]
            stored = {one.id for one in later if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
            if stored & set(names_in(value)):
                return False
            for i in range(where + 1, len(block)):
                block[i] = Put(target, value).visit(block[i])
        return not (reads_memory(value) and any(has_effect(s, self.effective) for s in block[place + 1 : where + 1]))


class Put(ast.NodeTransformer):
    """Puts a value in the place of a variable."""

    def __init__(self, target: str, value: ast.expr) -> None:
        self.target, self.put = target, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.put if node.id == self.target and isinstance(node.ctx, ast.Load) else node


class Renamer:
    """Gives variables names without numbers where another of that name neither is read nor would have another type."""

    def __init__(self, parameters: list[str], body: list[ast.stmt]) -> None:
        self.first: dict[str, int] = dict.fromkeys(parameters, 0)
        self.last: dict[str, int] = dict.fromkeys(parameters, 0)
        self.path: dict[str, tuple[tuple[int, int], ...]] = dict.fromkeys(parameters, ())
        self.clock = 0
        self.block(body, ())

    def block(self, body: list[ast.stmt], path: tuple[tuple[int, int], ...]) -> None:
        """Number statements; what a loop reads of before it lasts to its end."""
        for s in body:
            self.clock += 2
            if isinstance(s, (ast.For, ast.While, ast.If)):
                begin = self.clock
                self.see(s.iter if isinstance(s, ast.For) else s.test, path)
                if isinstance(s, ast.For):
                    self.see(s.target, (*path, (begin, 0)))
                self.block(s.body, (*path, (begin, 0)))
                self.block(s.orelse, (*path, (begin, 1)))
                self.clock += 2
                if not isinstance(s, ast.If):
                    for one in names_in([*s.body, s.iter if isinstance(s, ast.For) else s.test]):
                        if self.first.get(one, self.clock) < begin:
                            self.last[one] = self.clock
            else:
                self.see(s, path)

    def see(self, node: ast.AST, path: tuple[tuple[int, int], ...]) -> None:
        """Note the variables of a node."""
        for one in ast.walk(node):
            if isinstance(one, ast.Name):
                stores = isinstance(one.ctx, ast.Store)
                if stores:
                    self.first.setdefault(one.id, self.clock + 1)
                    # The outermost block that sets it.
                    self.path[one.id] = _common(self.path.get(one.id, path), path)
                self.last[one.id] = max(self.last.get(one.id, 0), self.clock + stores)

    def names(self, reserved: set[str]) -> dict[str, str]:
        """The new names."""
        of_name: dict[str, list[str]] = {}
        found = {}
        for old in sorted(self.first, key=lambda one: self.first[one]):
            base = re.sub(r"_\d+$", "", old) if self.first[old] else old
            number, new = 1, base
            while new in reserved or any(self.conflict(old, other) for other in of_name.get(new, ())):
                number += 1
                new = f"{base}_{number}"
            of_name.setdefault(new, []).append(old)
            found[old] = new
        return found

    def conflict(self, one: str, other: str) -> bool:
        """Two variables cannot have one name."""
        if self.first[one] < self.last[other] and self.first[other] < self.last[one]:
            return True
        mine, theirs = self.path[one], self.path[other]
        for x, y in zip(mine, theirs, strict=False):
            if x != y:
                return x[0] == y[0]
        return len(mine) != len(theirs)


def _common(one: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """The block that holds both."""
    found = []
    for x, y in zip(one, other, strict=False):
        if x != y:
            break
        found.append(x)
    return tuple(found)


def coalesced(body: list[ast.stmt], everything: list[ast.stmt]) -> list[ast.stmt]:
    """A block whose last statements copy its variables to others computes these others."""
    done: list[ast.stmt] = []
    for s in body:
        if isinstance(s, (ast.If, ast.For, ast.While)):
            s.body = coalesced(s.body, everything)
            s.orelse = coalesced(s.orelse, everything)
        done.append(s)
    total = names_in(everything)
    for copy in [s for s in done if isinstance(s, ast.Assign) and isinstance(s.value, ast.Name)]:
        target, value = copy.targets[0], copy.value
        if not isinstance(target, ast.Name) or not isinstance(value, ast.Name):
            continue
        a, b, end = target.id, value.id, done.index(copy)
        own = [i for i, s in enumerate(done[:end]) if b in stored_by(s)]
        if not own or len(own) != sum(b in stored_by(s) for s in flat(everything)) or own[0] > end:
            continue
        if not isinstance(done[own[0]], ast.Assign) or names_in(done)[b] != total[b]:
            continue
        between = done[own[0] + 1 : end]
        if any(names_in(s)[a] or a in stored_by(s) for s in between) or a in stored_by(done[own[0]]):
            continue
        after = done[end + 1 :]
        if any(names_in(s)[a] and names_in(s)[b] for s in after):
            continue
        swap = Renamed({b: a}, False)
        done = [swap.visit(s) if i >= own[0] else s for i, s in enumerate(done) if s is not copy]
    return done


def flat(body: list[ast.stmt]) -> list[ast.stmt]:
    """All plain statements, also of inner blocks."""
    found: list[ast.stmt] = []
    for s in body:
        if isinstance(s, (ast.If, ast.For, ast.While)):
            found += flat([*s.body, *s.orelse])
        else:
            found.append(s)
    return found


def stored_by(s: ast.stmt) -> set[str]:
    """The variables that a statement sets."""
    return {one.id for one in ast.walk(s) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


class Renamed(ast.NodeTransformer):
    """Puts new names in the place of old ones, and `x += y` in that of `x = x + y`."""

    def __init__(self, names: dict[str, str], augments: bool = True) -> None:
        self.names, self.augments = names, augments

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        self.generic_visit(node)
        target, value = node.targets[0], node.value
        if not (self.augments and isinstance(target, ast.Name) and isinstance(value, ast.BinOp)):
            return node
        same = isinstance(value.left, ast.Name) and value.left.id == target.id
        return ast.AugAssign(target, value.op, value.right) if same else node


def without_copies(body: list[ast.stmt]) -> list[ast.stmt]:
    """A block without assignments of a variable to itself."""
    for s in body:
        if isinstance(s, (ast.If, ast.For, ast.While)):
            s.body, s.orelse = without_copies(s.body), without_copies(s.orelse)
    return [s for s in body if not (isinstance(s, ast.Assign) and unparsed(s.targets[0]) == unparsed(s.value))]


# --- text ---


def text_of(body: list[ast.stmt], indent: int, width: int) -> list[str]:
    """Statements as lines."""
    lines: list[str] = []
    for s in body:
        pad = " " * indent
        start = len(lines)
        if isinstance(s, (ast.If, ast.While, ast.For)):
            if isinstance(s, ast.For):
                head = f"for {unparsed(s.target)} in {unparsed(s.iter)}:"
            else:
                head = f"{'if' if isinstance(s, ast.If) else 'while'} {unparsed(s.test)}:"
            lines += [pad + line for line in fitted(head, width - indent)]
            lines += text_of(s.body, indent + 4, width)
            if s.orelse:
                lines += [pad + "else:", *text_of(s.orelse, indent + 4, width)]
            if indent == 4 and len(lines) - start > 8:
                # A block of some length stands apart.
                lines[start:] = [*([""] if lines[:start] and lines[start - 1] else []), *lines[start:], ""]
        else:
            text = unparsed(s).replace("'", '"')
            if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Tuple):
                text = text.replace("(", "", 1).replace(")", "", 1) if text.startswith("(") else text
            lines += [pad + line for line in fitted(text, width - indent)]
    return lines[:-1] if lines and not lines[-1] else lines


def source_of(kernel: Kernel, sized: bool, width: int, reserved: set[str]) -> str:
    """A kernel or a function as text."""
    read = names_in(kernel.body)
    parameters = [one for one in kernel.parameters if read[one]]
    body = coalesced(kernel.body, kernel.body)
    names = Renamer(parameters, body).names(reserved)
    body = without_copies([Renamed(names).visit(s) for s in body])
    annotated = [f"{one}: tl.int64" if sized and one in WIDE else f"{one}: tl.int32" if sized and one in NARROW else one
                 for one in parameters]  # fmt: skip
    sizes = [one for one in parameters if one in WIDE or one in NARROW]
    decorator = f"@triton.jit(do_not_specialize={sizes!r})".replace("'", '"') if sized and sizes else "@triton.jit"
    head = fitted(f"def {kernel.name}({', '.join(annotated)}):", width)
    lines = [
        *fitted(decorator, width),
        *head,
        f'    """{kernel.doc.replace("SHAPE.sequences", str(SHAPE.sequences))}"""',
        *text_of(body, 4, width),
    ]
    return "\n".join(lines)


def reflowed(source: str, width: int) -> str:
    """A function whose head is laid out as formatters do."""
    head = re.search(r"^def \w+\([^)]*\) -> [^\n]*:  # fmt: skip$", source, re.MULTILINE)
    if head is None:
        return source
    text = re.sub(r"\(\s+|,?\s+(?=\))", lambda found: found[0][:1].strip(", "), head[0].removesuffix("  # fmt: skip"))
    return source.replace(head[0], "\n".join(fitted(" ".join(text.split()), width)))


PROGRAMS = {
    "read_kernel": "tile of tokens",
    "decide_kernel": f"{SHAPE.sequences} sequences, and more that add up what the first launch left",
    "apply_kernel": "tile of tokens",
}
WIDE = ("tokens", "sequences", "slots", "owner_count")
NARROW = ("tile_bits", "steps", "sequence_programs", "token_programs", "shares", "parts", "part")


# --- the whole part ---

LAUNCHES = '''def _fused(
    train_logp: torch.Tensor,
    rollout_logp: torch.Tensor,
    mask: torch.Tensor,
{offsets}) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `_eager` gives, by {launches} launches of Triton kernels.

    Programs over tokens have tiles of 2^tile_bits tokens; what a tile has of one sequence is a slot of the tables.
    """
    if train_logp.device.type == "cpu" and isinstance(read_kernel, triton.runtime.JITFunction):
        raise RuntimeError("backend='fused': expected tensors on a GPU, got some on the CPU")
    if train_logp.numel() == 0{no_sequences}:
        return _eager(train_logp, rollout_logp, mask{and_offsets})
{rows}    train_logp, rollout_logp, given = train_logp.contiguous(), rollout_logp.contiguous(), mask
    mask = mask.contiguous().view(torch.uint8) if mask.dtype == torch.bool else mask.contiguous()
    device, tokens, sequences = train_logp.device, train_logp.numel(), offsets.shape[0] - 1
    least = 9 if tokens >= 1024 * sequences else 8
    tile_bits = min(max((tokens // 2048 - 1).bit_length(), least), 11)
    # How often `owner_before` narrows its search.
    steps, left = 0, sequences + 1
    while left > 0:
        steps, left = steps + 1, left // 32
    token_programs = (tokens >> tile_bits) + 1
    slots = token_programs + sequences + 1
    sequence_programs = triton.cdiv(sequences + 2, 32)
{shares}    part = max(256, triton.cdiv(token_programs, 256))
    parts = triton.cdiv(token_programs, part)

    def table(rows, columns, dtype):
        return torch.empty((rows, columns), dtype=dtype, device=device)

{tables}
    counter = torch.empty(sequence_programs + 2, dtype=torch.int32, device=device)
    keep = torch.empty(sequences, dtype=torch.bool, device=device)
    keep_out = keep.view(torch.uint8)
    statistics = torch.empty({statistics}, dtype=torch.float64, device=device)
{outputs}
    launch = {{"num_warps": 1, "enable_fp_fusion": True}}
{launched}
    return {returned}, keep, statistics'''
ROWS = """    # Each row is a sequence of a packed batch.
    offsets = torch.arange(train_logp.shape[0] + 1, device=train_logp.device) * train_logp.shape[1]
"""


def fused(spec: Spec, layout: str, numbers: tuple[str, ...], width: int) -> list[str]:
    """Write the Triton part of a file: constants, functions, kernels and `_fused`, for batches with a mask.

    Args:
        spec: The Spec.
        layout: "packed" or "padded".
        numbers: The statistics that `_fused` gives, as `completed` has them.
        width: Of the longest line.

    Raises:
        CannotEject: The kernels do not run it.
    """
    if (why := beyond_kernels(spec)) is not None:
        raise CannotEject(f"spec: the kernels do not run it: {why}")
    more = [repr(c) for c in spec.criteria if c.tensor_name is not None or c.when != "any"]
    more += ["turns"] if spec.measures_turns else []
    more += ["normalize"] if spec.weight is not None and spec.weight.normalize is not None else []
    more += ["detail='full'"] if spec.detail == "full" else []
    if more:
        raise CannotEject(
            f"spec: expected log-probs, mask and cu_seqlens alone for the Triton part, got {', '.join(more)}"
        )
    kernels, found, plan = kernels_of(spec, numbers)
    functions = list(found.functions.values())
    reserved = {*found.verbatim, *(one.name for one in (*functions, *kernels)), *found.constants, "tl", "triton"}
    written = {one: reflowed(text, width) for one, text in found.verbatim.items()}
    written |= {one.name: source_of(one, False, width, reserved) for one in functions}
    texts: list[str] = []
    for place, kernel in reversed(list(enumerate(kernels, 1))):
        launch = f"# Launch {place} of {len(kernels)}, a program for each {PROGRAMS[kernel.name]}.\n"
        texts.insert(0, launch + source_of(kernel, True, width, reserved))
    for one, text in reversed(written.items()):
        # What a plan has made of its callers may have left none.
        if any(re.search(rf"\b{one}\b", caller) for caller in texts):
            texts.insert(0, text)
    # Plain torch has constants of the same names, which are floats.
    labels = {label: f"TL_{label}" for label in found.constants}
    if labels:
        pattern = re.compile(rf"\b({'|'.join(map(re.escape, labels))})\b")
        texts = [pattern.sub(lambda match: labels[match[0]], text) for text in texts]
    constants = [f"{labels[label]} = tl.constexpr({power(x)})" for label, x in sorted(found.constants.items())
                 if any(re.search(rf"\b{labels[label]}\b", text) for text in texts)]  # fmt: skip
    parts = [
        "\n".join(constants) or "# The kernels have no constants.",
        *texts,
        launches_of(plan, kernels, layout, width),
    ]
    return [part for part in parts if part]


def launches_of(plan: Plan, kernels: list[Kernel], layout: str, width: int) -> str:
    """Write the function that launches the kernels."""
    sharing, rows_of_decide = "", "sequence_programs"
    if plan.zeroes:
        rows_of_decide += " * shares"
        sharing = """    # Programs that share the zeroing of what one of them rejects.
    shares = max(1, min(tokens // 32768, 1024) // sequence_programs) if tokens > 131072 * sequence_programs else 1
"""
    tables = [
        ("counts", len(plan.counts), "slots", "int32"), ("integers", len(plan.integers), "slots", "int64"),
        ("floats", len(plan.floats), "slots", "float32"), ("peaks", len(plan.peaks), "slots", "int32"),
        ("token_sums", len(plan.token_sums), "token_programs", "float64"),
        ("token_maxima", kept_maxima(plan), "token_programs", "float64"),
        ("part_sums", len(plan.token_sums), "parts", "float64"), ("part_maxima", kept_maxima(plan), "parts", "float64"),
        ("sequence_sums", len(plan.sequence_sums), rows_of_decide, "float64"),
        ("sequence_maxima", len(plan.sequence_maxima), rows_of_decide, "float64"),
        ("states", 1 if plan.applies else 0, "sequences", "int32"),
        ("sequence_weights", 1 if plan.spreads else 0, "sequences", "float32"),
    ]  # fmt: skip
    used = {one: names_in(kernel.body) for kernel in kernels for one in kernel.parameters}
    read = {one for one, body in used.items() if any(names_in(kernel.body)[one] for kernel in kernels)}
    lines = [f"    {name} = table({rows}, {columns}, torch.{kind})" for name, rows, columns, kind in tables
             if rows and name in read]  # fmt: skip
    outputs = ["    weights = torch.empty_like(train_logp, dtype=torch.float32)"] if plan.writes_weights else []
    outputs += ["    mask_out = torch.empty_like(mask)"] if plan.writes_mask else []
    programs = {
        "read_kernel": "token_programs",
        "decide_kernel": f"{rows_of_decide} + parts * {groups(plan)}",
        "apply_kernel": "token_programs",
    }
    launched = []
    for kernel in kernels:
        given = [one for one in kernel.parameters if names_in(kernel.body)[one]]
        call = f"{kernel.name}[({programs[kernel.name]},)]({', '.join(given)}, **launch)"
        launched += ["    " + line for line in fitted(call, width - 4)]
    back = "mask_out.view(given.dtype)" if plan.writes_mask else "given"
    packed = layout == "packed"
    return LAUNCHES.format(
        offsets="    offsets: torch.Tensor,\n" if packed else "",
        no_sequences=" or offsets.shape[0] < 2" if packed else "",
        and_offsets=", offsets" if packed else "",
        rows="" if packed else ROWS,
        launches="two" if len(kernels) == 2 else "three",
        shares=sharing,
        tables="\n".join(lines),
        statistics=sum(len(getattr(plan, table)) for table in OF_BATCH),
        outputs="\n".join(outputs),
        launched="\n".join(launched),
        returned=f"{'weights' if plan.writes_weights else 'None'}, {back}",
    )
