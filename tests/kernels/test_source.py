"""Rules of the kernels' source that the Triton at hand does not enforce, and another supported one does."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from importlib import import_module

from rollout_corr import kernels
from rollout_corr.kernels.correct.plan import Plan, PlannedCriterion
from rollout_corr.kernels.policy_loss.plan import LossPlan


def texts_of(owner):
    """Names of the attributes of a class that are texts, fields and properties."""
    fields = {name: str(kind) for name, kind in inspect.get_annotations(owner).items()}
    computed = {name: inspect.get_annotations(x.fget) for name, x in vars(owner).items() if isinstance(x, property)}
    fields |= {name: str(kinds.get("return")) for name, kinds in computed.items()}
    return {name for name, kind in fields.items() if "str" in kind and "tuple" not in kind}


TEXTS = texts_of(Plan) | texts_of(PlannedCriterion) | texts_of(LossPlan)


def compiled(x):
    """Tell whether this is a function of a kernel; those of constants run in Python."""
    return type(x).__name__ in ("JITFunction", "InterpretedFunction")


def called(function, module):
    """Find what a call in a module calls: a name of its own, or one of a module that it imports."""
    if isinstance(function, ast.Attribute):
        return getattr(vars(module).get(ast.unparse(function.value)), function.attr, None)
    return vars(module).get(ast.unparse(function))


def test_texts_are_handed_on_as_constants_of_their_own():
    """Triton 3.6 refuses `f(PLAN.weighs)` for a text: only `level: tl.constexpr = PLAN.weighs` makes it one."""
    assert {"weighs", "sum", "kl"} <= TEXTS
    seen, found = 0, []
    for module in pkgutil.walk_packages(kernels.__path__, "rollout_corr.kernels."):
        loaded = import_module(module.name)
        for call in ast.walk(ast.parse(inspect.getsource(loaded))):
            if isinstance(call, ast.Call):
                if not compiled(called(call.func, loaded)):
                    continue
                seen += 1
                given = [*call.args, *(keyword.value for keyword in call.keywords)]
                constants = [x for x in given if isinstance(x, ast.Attribute) and ast.unparse(x.value).isupper()]
                found += [f"{module.name}:{x.lineno} {ast.unparse(x)}" for x in constants if x.attr in TEXTS]
    assert seen > 100 and not found


def test_annotations_are_types():
    """Triton refuses a function that names another function, and under Python 3.10 `typing.Any` is one."""
    seen, found = 0, []
    for module in pkgutil.walk_packages(kernels.__path__, "rollout_corr.kernels."):
        loaded = import_module(module.name)
        for function in ast.walk(ast.parse(inspect.getsource(loaded))):
            if not isinstance(function, ast.FunctionDef) or not function.decorator_list:
                continue
            if ast.unparse(function.decorator_list[-1]) in ("triton.constexpr_function", "triton.jit"):
                seen += 1
                kinds = [argument.annotation for argument in ast.walk(function.args) if isinstance(argument, ast.arg)]
                found += [f"{module.name}.{function.name}" for kind in kinds if kind and ast.unparse(kind) == "Any"]
    assert seen > 50 and not found
