"""Small frameworks made for attacks on drop-ins: with functions that fit, and with every kind that does not.

A framework has three modules with a function, a function and two methods that a drop-in replaces. Theirs say "theirs"
and ours say "ours", with all the arguments that they got.
"""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

import pytest

from rollout_corr.frameworks.shared.dropin import DropIn, Target


class Kind(NamedTuple):
    """How a function of the framework is written.

    Attributes:
        source: Its source, with its name as "correct", and "theirs" returned with what it got.
        words: What a refusal says of it; None if it fits.
    """

    source: str
    words: str | None = None


def _plain(parameters, got="x, bound"):
    return f"def correct({parameters}):\n    return ('theirs', {got})\n"


HANDED_ON = """
def handing(function):
    @functools.wraps(function)
    def handed(*args, **kwargs):
        return function(*args, **kwargs)
    return handed

@handing
"""
CHANGED = """
def changing(function):
    @functools.wraps(function)
    def changed(bound, x=2.0):
        return function(x, bound)
    return changed

@changing
"""
RETURNS = "        return ('theirs', x, bound)\n"
RIGHT = _plain("x, bound=2.0")
FITTING = {
    "right": Kind(RIGHT),
    "annotated": Kind(_plain("x: 'int', bound: 'float | None' = 2.0")),
    "an integer default": Kind(_plain("x, bound=2")),
    "decorated": Kind(HANDED_ON + RIGHT),
    "decorated twice": Kind(HANDED_ON + "@handing\n" + RIGHT),
    "a partial of nothing": Kind(RIGHT + "correct = functools.partial(correct)\n"),
    "a callable object": Kind(
        f"class Correct:\n    def __call__(self, x, bound=2.0):\n{RETURNS}\ncorrect = Correct()\n"
    ),
    "defined twice": Kind(_plain("y") + RIGHT),
}
MISFITS = {
    "renamed": Kind(_plain("y, bound=2.0", "y, bound"), "parameter 1 is 'y', expected 'x'"),
    "reordered": Kind(_plain("bound, x=2.0"), "parameter 1 is 'bound', which stands elsewhere, expected 'x'"),
    "another default": Kind(_plain("x, bound=3.0"), "parameter 'bound' has the default 3.0, expected the default 2.0"),
    "None by default": Kind(_plain("x, bound=None"), "parameter 'bound' has the default None"),
    "a default of True": Kind(_plain("x, bound=True"), "parameter 'bound' has the default True"),
    "an object by default": Kind(_plain("x, bound=[2.0]"), "parameter 'bound' has the default <list>"),
    "no default": Kind(_plain("x, bound"), "parameter 'bound' has no default, expected the default 2.0"),
    "one parameter more": Kind(_plain("x, bound=2.0, more=0"), "parameter 3 is 'more', expected none"),
    "one parameter less": Kind(_plain("x", "x, 2.0"), "parameter 'bound' is missing"),
    "keyword-only": Kind(_plain("x, *, bound=2.0"), "parameter 'bound' is keyword-only"),
    "positional-only": Kind(_plain("x, /, bound=2.0"), "parameter 'x' is positional-only"),
    "anything": Kind(_plain("*args, **kwargs", "args, kwargs"), "parameter 1 is 'args', expected 'x'"),
    "more keywords": Kind(_plain("x, bound=2.0, **more"), "parameter 3 is 'more', expected none"),
    "gone": Kind("", "is missing"),
    "None": Kind("correct = None\n", "is missing"),
    "a number": Kind("correct = 3\n", "is no function, but of type int"),
    "a class": Kind("class correct:\n    def __init__(self, x, bound=2.0): pass\n", "is no function, but a class"),
    "a coroutine": Kind("async " + RIGHT, "is a coroutine function"),
    "a generator": Kind("def correct(x, bound=2.0):\n    yield x\n", "is a generator function"),
    "decorated otherwise": Kind(CHANGED + RIGHT, "parameter 1 is 'bound', which stands elsewhere, expected 'x'"),
    "decorated but renamed": Kind(HANDED_ON + _plain("y, bound=2.0", "y, bound"), "parameter 1 is 'y', expected 'x'"),
    "a partial": Kind(RIGHT + "correct = functools.partial(correct, bound=3.0)\n", "'bound' is keyword-only"),
    "a builtin": Kind("correct = max\n", "has no signature that could be compared"),
    "wrapping itself": Kind(RIGHT + "correct.__wrapped__ = correct\n", "has no signature that could be compared"),
    "a lookup that raises": Kind("def __getattr__(name):\n    raise ImportError(name)\n", "is missing"),
}
# Methods have a place of their own to be wrong in.
METHODS = {
    "right": Kind("    def step(self, x): return ('theirs', x)\n"),
    "inherited": Kind("    pass\n"),
    "a classmethod": Kind(
        "    @classmethod\n    def step(cls, x): return ('theirs', x)\n", "is no function, but of type classmethod"
    ),
    "a property": Kind(
        "    @property\n    def step(self): return lambda x: ('theirs', x)\n", "is no function, but of type property"
    ),
    "static": Kind(
        "    @staticmethod\n    def step(x): return ('theirs', x)\n", "parameter 1 is 'x', which stands elsewhere"
    ),
    "renamed": Kind("    def step(self, y): return ('theirs', y)\n", "parameter 2 is 'y', expected 'x'"),
}
UNFIT_METHODS = {kind.words for kind in METHODS.values() if kind.words is not None}
HEAD = "import functools\n"
TRAINER = """
from {name}.helper import correct as imported
from {name} import helper

class Base:
    def step(self, x):
        return ('theirs', x)

    @staticmethod
    def fixed(x, bound=2.0):
        return ('theirs', x, bound)

class Refusing(type):
    def __setattr__(cls, name, value):
        if {refuses}:
            raise TypeError('this class is immutable')
        super().__setattr__(name, value)

class Trainer(Base, metaclass=Refusing):
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
        misfits: Words of the refusal by the module that does not fit.
    """

    name: str
    misfits: dict[str, str]

    @property
    def modules(self):
        """The modules in which functions are replaced."""
        return [f"{self.name}.{part}" for part in ("helper", "losses", "trainer")]

    @property
    def targets(self):
        """The functions that the drop-in replaces."""
        helper, losses, trainer = self.modules
        return (
            Target(helper, "correct", ours),
            Target(losses, "correct", ours),
            Target(trainer, "Trainer.step", stepping, takes_original=True),
            Target(trainer, "Base.fixed", ours),
        )

    def drop_in(self):
        """Make a drop-in for it."""
        return DropIn(self.name, ("1.0",))

    def answers(self):
        """Every way to a function that fits, in the modules that have been imported."""
        found = {}
        helper, losses, trainer = (sys.modules.get(module) for module in self.modules)
        for module in (helper, losses):
            if module is not None and module.__name__ not in self.misfits:
                found[f"{module.__name__}.correct"] = module.correct
        if helper is not None and "REGISTRY" in vars(helper):
            found["registry"] = helper.REGISTRY["correct"]
        if trainer is not None:
            found["fixed"] = trainer.Trainer.fixed
            if self.modules[0] not in self.misfits:
                found["by name"] = trainer.imported
            if UNFIT_METHODS.isdisjoint({self.misfits.get(trainer.__name__)}):
                found["step"] = trainer.Trainer().step
        return found

    def forget(self):
        """Take it out of this process."""
        for name in [name for name in sys.modules if name.partition(".")[0] == self.name]:
            del sys.modules[name]


def write(folder, name, helper="right", losses="right", method="right", refuses=False, version="1.0", raises=False):
    """Write a framework whose functions are of some kinds.

    Args:
        folder: Where the package is made.
        name: Of the package.
        helper: Kind of the function of helper.py, a key of FITTING or MISFITS.
        losses: Kind of that of losses.py.
        method: Kind of Trainer.step, a key of METHODS.
        refuses: The class Trainer refuses assignments.
        version: `__version__`.
        raises: losses.py raises while the file "broken" lies beside it.
    """
    functions = FITTING | MISFITS
    root = folder / name
    root.mkdir()
    (root / "__init__.py").write_text(f"__version__ = {version!r}\n")
    registry = "REGISTRY = {'correct': correct}\n" if helper in FITTING else ""
    (root / "helper.py").write_text(HEAD + functions[helper].source + registry)
    broken = ""
    if raises:
        (root / "broken").write_text("")
        broken = "import pathlib\nif pathlib.Path(__file__).with_name('broken').exists(): raise OSError('broken')\n"
    (root / "losses.py").write_text(HEAD + broken + functions[losses].source)
    text = TRAINER.format(name=name, refuses=bool(refuses) and "name == 'step'", method=METHODS[method].source)
    if helper not in FITTING:
        text = text.replace(f"from {name}.helper import correct as imported", "imported = lambda x: ('theirs', x)")
    (root / "trainer.py").write_text(text)
    kinds = {"helper": functions[helper], "losses": functions[losses], "trainer": METHODS[method]}
    misfits = {f"{name}.{part}": kind.words for part, kind in kinds.items() if kind.words is not None}
    if refuses and "trainer" not in "".join(misfits):
        misfits[f"{name}.trainer"] = "could not be replaced (TypeError: this class is immutable)"
    return Fake(name, misfits)


def load(fake, *parts):
    """Import modules of the framework; all that have functions by default."""
    return [importlib.import_module(f"{fake.name}.{part}") for part in parts or ("helper", "losses", "trainer")]


def all_are(fake, who):
    """Tell whether every way to a function answers "ours" or "theirs", with the arguments."""
    return all(function(7)[:2] == (who, 7) for function in fake.answers().values())


def refusal(action):
    """Give what the RuntimeError of an action says."""
    with pytest.raises(RuntimeError) as caught:
        action()
    return str(caught.value)
