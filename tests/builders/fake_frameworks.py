"""Small frameworks made for drop-ins: with functions that fit, and with every kind that does not.

A framework has three modules with a function, a function and two methods that a drop-in replaces. Theirs say "theirs"
and ours say "ours", with all the arguments that they got.
"""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

from rollout_corr.frameworks.shared.dropin import DropIn, Target


def _plain(parameters, got="x, bound"):
    return f"def correct({parameters}):\n    return ('theirs', {got})\n"


HANDED_ON = """
import functools

def handing(function):
    @functools.wraps(function)
    def handed(*args, **kwargs):
        return function(*args, **kwargs)
    return handed

@handing
"""
CHANGED = HANDED_ON.replace("handed(*args, **kwargs)", "handed(bound, x=2.0)").replace("*args, **kwargs", "x, bound")
RIGHT = _plain("x, bound=2.0")
# The source of the function.
FITTING = {
    "right": RIGHT,
    "annotated": _plain("x: 'int', bound: 'float | None' = 2.0"),
    "an integer default": _plain("x, bound=2"),
    "decorated twice": HANDED_ON + "@handing\n" + RIGHT,
    "a callable object": (
        "class Correct:\n    def __call__(self, x, bound=2.0):\n        return ('theirs', x, bound)\n"
        "correct = Correct()\n"
    ),
}
FITTING["looked up when asked"] = RIGHT.replace("correct", "_there") + (
    "def __getattr__(name):\n    if name != 'correct':\n        raise AttributeError(name)\n    return _there\n"
)
# The source of the function, and what a refusal says of it.
MISFITS = {
    "a lookup that raises": ("def __getattr__(name):\n    raise ImportError(name)\n", "is missing"),
    "renamed": (
        _plain("y, bound=2.0", "y, bound"),
        "takes (y, bound=2.0), expected (x, bound=2.0): they differ at 'y'",
    ),
    "reordered": (_plain("bound, x=2.0"), "takes (bound, x=2.0), expected (x, bound=2.0)"),
    "another default": (_plain("x, bound=3.0"), "they differ at 'bound'"),
    "no default": (_plain("x, bound"), "they differ at 'bound'"),
    "one parameter more": (_plain("x, bound=2.0, more=0"), "they differ at 'more'"),
    "one parameter less": (_plain("x", "x, 2.0"), "they differ at 'bound'"),
    "keyword-only": (_plain("x, *, bound=2.0"), "takes (x, *, bound=2.0)"),
    "anything": (_plain("*args, **kwargs", "args, kwargs"), "they differ at 'args'"),
    "gone": ("", "is missing"),
    "None": ("correct = None\n", "is missing"),
    "a class": ("class correct:\n    def __init__(self, x, bound=2.0): pass\n", "is no function, but a class"),
    "a number": ("correct = 3\n", "is no function, but of type int"),
    "a coroutine": ("async " + RIGHT, "is a coroutine or a generator function"),
    "decorated otherwise": (CHANGED + RIGHT, "takes (bound, x=2.0)"),
    "a builtin": ("correct = max\n", "has no signature that could be compared"),
}
# The source of Trainer.step, and what a refusal says of it.
METHODS = {
    "right": ("    def step(self, x): return ('theirs', x)\n", None),
    "inherited": ("    pass\n", None),
    "a property": ("    @property\n    def step(self): return lambda x: ('theirs', x)\n", "but of type property"),
    "static": ("    @staticmethod\n    def step(x): return ('theirs', x)\n", "they differ at 'x'"),
}
TRAINER = """
from {name}.helper import correct as imported

class Base:
    def step(self, x):
        return ('theirs', x)

    @staticmethod
    def fixed(x, bound=2.0):
        return ('theirs', x, bound)

class Trainer(Base):
{method}
"""


def ours(x, bound=2.0, *, note="ours"):
    """The replacement of the functions."""
    return note, x, bound


def stepping(original, *, note="ours"):
    """Make the replacement of the method."""

    def step(self, x):
        return note, x

    return step


class Fake(NamedTuple):
    """A framework on disk.

    Attributes:
        name: Its package.
        misfits: What a refusal says, by the part that does not fit.
    """

    name: str
    misfits: dict[str, str]

    @property
    def targets(self):
        """The functions that the drop-in replaces."""
        helper, losses, trainer = (f"{self.name}.{part}" for part in ("helper", "losses", "trainer"))
        return (
            Target(helper, "correct", ours),
            Target(losses, "correct", ours),
            Target(trainer, "Trainer.step", stepping, takes_original=True),
            Target(trainer, "Base.fixed", ours),
        )

    def drop_in(self, checked=("1.0",), **more):
        """Make a drop-in for it."""
        return DropIn(self.name, checked, **more)

    def load(self, *parts):
        """Import modules of it; all that have functions by default."""
        return [importlib.import_module(f"{self.name}.{part}") for part in parts or ("helper", "losses", "trainer")]

    def answers(self):
        """Who answers at every way to a function, in the modules that have been imported and fit."""
        found = {}
        helper, losses, trainer = (sys.modules.get(f"{self.name}.{part}") for part in ("helper", "losses", "trainer"))
        if helper is not None and "helper" not in self.misfits:
            found["helper"] = helper.correct
            if helper.REGISTRY["correct"] is not None:
                found["registry"] = helper.REGISTRY["correct"]
        if losses is not None and "losses" not in self.misfits:
            found["losses"] = losses.correct
        if trainer is not None:
            found["static"] = trainer.Trainer.fixed
            if "helper" not in self.misfits:
                found["by name"] = trainer.imported
            if "trainer" not in self.misfits:
                found["method"] = trainer.Trainer().step
        return {way: function(7)[0] for way, function in found.items()}

    def forget(self):
        """Take it out of this process."""
        for name in [name for name in sys.modules if name.partition(".")[0] == self.name]:
            del sys.modules[name]


def write(folder, name, helper="right", losses="right", method="right", version="1.0"):
    """Write a framework whose functions are of some kinds: keys of FITTING or MISFITS, of METHODS for Trainer.step."""
    functions = {kind: (source, None) for kind, source in FITTING.items()} | MISFITS
    root = folder / name
    root.mkdir()
    # Looked up when asked, as TRL's.
    found = f"def __getattr__(name):\n    if name == '__version__':\n        return {version!r}\n"
    (root / "__init__.py").write_text(f"{found}    raise AttributeError(name)\n")
    (root / "helper.py").write_text(functions[helper][0] + "REGISTRY = {'correct': globals().get('correct')}\n")
    (root / "losses.py").write_text(functions[losses][0])
    text = TRAINER.format(name=name, method=METHODS[method][0])
    if helper in MISFITS:
        text = text.replace(f"from {name}.helper import correct as imported", "imported = None")
    (root / "trainer.py").write_text(text)
    importlib.invalidate_caches()
    kinds = {"helper": functions[helper], "losses": functions[losses], "trainer": METHODS[method]}
    return Fake(name, {part: words for part, (_, words) in kinds.items() if words is not None})
