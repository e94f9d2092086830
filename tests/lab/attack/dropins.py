"""Drop-ins: random small frameworks, right ones and misfits, imported, installed and uninstalled in any order.

After every step a model of this file, which knows the framework as it was written and nothing of the drop-in, says who
has to answer: every way to a function is ours, or every way is the framework's own and `installed()` says why.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from builders import fake_frameworks
from builders.fake_frameworks import FITTING, METHODS, MISFITS
from lab.attack.campaign import Area, Outcome
from rollout_corr.frameworks.shared import imports

PARTS = ("helper", "losses", "trainer")


class Wrong(Exception):
    """Something differs from the model."""


class Attempt:
    """One framework, its drop-in, and what has to be true of them.

    Attributes:
        note: The switch of the installation; None without one.
        refused: The part whose refusal is the newest: at its import, which ended the installation, or by `install()`.
        imported: The parts that are imported.
        said: The first refusal.
    """

    def __init__(self, rng, folder):
        self.rng = rng
        kinds = {"helper": self.kind(), "losses": self.kind(), "method": rng.choice(list(METHODS))}
        self.fake = fake_frameworks.write(folder, f"peer_{folder.name}", **kinds)
        self.drop_in = self.fake.drop_in()
        self.note, self.refused, self.imported, self.said = None, None, set(), ""

    def kind(self):
        return self.rng.choice(list(FITTING if self.rng.random() < 0.75 else MISFITS))

    def do_import(self):
        part = self.rng.choice(PARTS)
        expected = []
        for needed in ["helper", part] if part == "trainer" and "helper" not in self.fake.misfits else [part]:
            words = self.fake.misfits.get(needed)
            if needed in self.imported:
                continue
            if self.note is not None and words:
                expected, self.refused, self.note = [words], needed, None
                break
            self.imported.add(needed)
        self.attempt(lambda: self.fake.load(part), expected)

    def do_install(self):
        note = self.rng.choice(("ours", "other"))
        misfits = [words for part, words in self.fake.misfits.items() if part in self.imported]
        # An installation that is as it should be is not looked at again.
        stands = self.note == note
        said = self.attempt(lambda: self.drop_in.install(self.fake.targets, note=note), [] if stands else misfits)
        if said:
            self.refused = next(part for part in self.imported if self.fake.misfits.get(part, said + "?") in said)
        else:
            self.note, self.refused = note, None

    def do_uninstall(self):
        self.drop_in.uninstall()
        self.note = self.refused = None

    def attempt(self, action, expected):
        """Return the refusal of an action, or an empty text; compare with the words that one of the refusals has."""
        try:
            action()
        except RuntimeError as error:
            if not any(words in str(error) for words in expected):
                raise Wrong(f"expected one of {expected}, got {error}") from error
            self.said = self.said or str(error)
            return str(error)
        if expected:
            raise Wrong(f"nothing was refused, expected {expected}")
        return ""

    def check(self, after):
        state = self.drop_in.installed()
        ours = self.note is not None
        waiting = {f"{self.fake.name}.{part}" for part in PARTS if part not in self.imported}
        if state.in_place != (ours and bool(self.imported)) or (not ours and state.replaced):
            raise Wrong(f"after {after}: in_place is {state.in_place}, {state.replaced} are ours: {state.why}")
        if self.refused is not None and self.fake.misfits[self.refused] not in state.why:
            raise Wrong(f"after {after}: why does not name what did not fit: {state.why}")
        if self.note is not None and set(state.waiting) != waiting:
            raise Wrong(f"after {after}: waiting for {state.waiting}, expected {sorted(waiting)}")
        answers = self.fake.answers()
        if set(answers.values()) - {self.note if ours else "theirs"}:
            raise Wrong(f"after {after}: {answers}")


def attack(seed):
    """Make one framework and some twelve steps with it."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="peer") as name:
        sys.path.insert(0, name)
        made = Attempt(rng, Path(name))
        try:
            for step in rng.choices(("import", "install", "uninstall"), (5, 2, 1), k=rng.randint(4, 16)):
                getattr(made, f"do_{step}")()
                made.check(step)
            made.do_uninstall()
            made.check("the end")
            if any(type(finder).__module__ == imports.__name__ for finder in sys.meta_path):
                raise Wrong("a finder is left in sys.meta_path")
        except Wrong as error:
            return Outcome("wrong", str(error))
        finally:
            sys.path.remove(name)
            sys.path_importer_cache.pop(name, None)
            made.drop_in.uninstall()
            made.fake.forget()
    return Outcome("refused", made.said) if made.said else Outcome("right")


AREA = Area("dropins", "frameworks", attack, count=3_000, few=4)
