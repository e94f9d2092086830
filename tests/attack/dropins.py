"""Drop-ins: random small frameworks, right ones and misfits, imported, reloaded and installed in any order.

After every step a model of this file, which knows the framework as it was written and nothing of the drop-in, says who
has to answer: every way to a function is ours with the arguments that it was given, or every way is the framework's own
and `installed()` says why.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from attack.campaign import Area, Outcome
from builders import fake_frameworks
from builders.fake_frameworks import FITTING, METHODS, MISFITS
from rollout_corr.frameworks.shared import after_import

PARTS = ("helper", "losses", "trainer")
STEPS = ("import", "import", "import", "import", "install", "install", "reload", "uninstall", "replace", "call")


class Wrong(Exception):
    """Something differs from the model."""


class Attempt:
    """One framework, its drop-in, and what has to be true of them.

    Attributes:
        installed: The switch `note` of the installation; None without one.
        refused: The parts that were refused at their import, since the installation.
        imported: The parts that are imported.
        stale: The trainer holds a function by name that its module has replaced itself, before the installation.
        said: The first refusal.
    """

    def __init__(self, rng, folder):
        self.rng = rng
        kinds = {"helper": self.kind(), "losses": self.kind(), "method": self.kind_of(METHODS, 0.8)}
        self.fake = fake_frameworks.write(folder, f"peer_{folder.name}", refuses=rng.random() < 0.1, **kinds)
        if rng.random() < 0.15:
            archive = shutil.make_archive(str(folder / "packed"), "zip", folder, self.fake.name)
            shutil.rmtree(folder / self.fake.name)
            sys.path.insert(0, archive)
        importlib.invalidate_caches()
        self.drop_in = self.fake.drop_in()
        self.installed, self.refused, self.imported, self.stale, self.said = None, set(), set(), False, ""

    def kind(self):
        return self.rng.choice(list(FITTING)) if self.rng.random() < 0.75 else self.rng.choice(list(MISFITS))

    def kind_of(self, table, fits):
        right = [name for name, kind in table.items() if kind.words is None]
        wrong = [name for name, kind in table.items() if kind.words is not None]
        return self.rng.choice(right if self.rng.random() < fits else wrong)

    def words(self, part):
        """The words of a refusal of a part; None if it fits."""
        return self.fake.misfits.get(f"{self.fake.name}.{part}")

    # --- steps ---

    def step(self):
        name = self.rng.choice(STEPS)
        getattr(self, f"do_{name}")()
        self.check(name)

    def do_import(self):
        part = self.rng.choice(PARTS)
        order = ["helper", "trainer"] if part == "trainer" else [part]
        expected = None
        for needed in order:
            if needed in self.imported:
                continue
            words = self.words(needed)
            # Nothing is assigned after another part was refused, so no assignment fails.
            unassigned = self.refused - {needed} and words is not None and words.startswith("could not be replaced")
            if self.installed is not None and words and not unassigned:
                expected = words
                self.refused.add(needed)
                break
            self.imported.add(needed)
            self.refused.discard(needed)
        how = self.rng.choice(("plainly", "by_threads", "lazily"))
        errors = getattr(self, how)(f"{self.fake.name}.{part}")
        self.expect(f"import {part} {how}", errors, expected)

    def plainly(self, module):
        return [attempt(lambda: importlib.import_module(module))]

    def by_threads(self, module):
        gate, errors = threading.Barrier(3), []

        def one():
            gate.wait(10)
            errors.append(attempt(lambda: importlib.import_module(module)))

        threads = [threading.Thread(target=one) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        return errors

    def lazily(self, module):
        if module in sys.modules or module.endswith("trainer"):
            return self.plainly(module)

        def load():
            spec = importlib.util.find_spec(module)
            spec.loader = importlib.util.LazyLoader(spec.loader)
            sys.modules[module] = made = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(made)
            try:
                made.first_use = made.__name__, vars(made).get("correct")
            except BaseException:
                del sys.modules[module]
                raise

        return [attempt(load)]

    def do_install(self):
        note = self.rng.choice(("ours", "other"))
        wrong = [part for part in PARTS if part in self.imported and self.words(part)]
        errors = [attempt(lambda: self.drop_in.install(self.fake.targets, note=note))]
        self.expect("install", errors, [self.words(part) for part in wrong] or None)
        if not wrong:
            self.installed, self.refused = note, set()

    def do_reload(self):
        part = self.rng.choice(PARTS)
        module = sys.modules.get(f"{self.fake.name}.{part}")
        if part in self.imported and module is not None:
            # A part that does not fit was imported before the installation, which was then refused.
            self.expect(f"reload {part}", [attempt(lambda: importlib.reload(module))], None)
            self.age(part)

    def do_uninstall(self):
        self.drop_in.uninstall()
        self.installed, self.refused = None, set()

    def do_replace(self):
        """Import a part anew, as a test runner does that clears sys.modules."""
        part = self.rng.choice(("helper", "losses"))
        if part in self.imported and not self.words(part):
            del sys.modules[f"{self.fake.name}.{part}"]
            self.expect(f"import {part} anew", self.plainly(f"{self.fake.name}.{part}"), None)
            self.age(part)

    def age(self, part):
        """Mark what the trainer took by name from a module that has new functions now."""
        if part == "trainer":
            self.stale = False
        elif part == "helper" and "trainer" in self.imported and not self.ours():
            self.stale = True

    def ours(self):
        return self.installed is not None and not self.refused

    def do_call(self):
        pass

    # --- what has to be true ---

    def expect(self, what, errors, expected):
        """Compare what was raised with the words of a refusal, or with those of any of several."""
        for error in errors:
            if expected is None:
                if error is not None:
                    raise Wrong(f"{what}: raised {type(error).__name__}: {error}")
                continue
            words = [expected] if isinstance(expected, str) else expected
            if not isinstance(error, RuntimeError) or not any(word in str(error) for word in words):
                raise Wrong(f"{what}: expected a refusal with {words}, got {error!r}")
            self.said = self.said or str(error)

    def check(self, after):
        state = self.drop_in.installed()
        ours = self.ours()
        active = ours and bool(self.imported)
        if state.active != active:
            raise Wrong(f"after {after}: active is {state.active}, expected {active}: {state.why}")
        if not ours and state.replaced:
            raise Wrong(f"after {after}: {state.replaced} are ours and should not be")
        if not all(self.words(part) in state.why for part in self.refused):
            raise Wrong(f"after {after}: why does not name what did not fit: {state.why}")
        waiting = {f"{self.fake.name}.{part}" for part in PARTS if part not in self.imported}
        if self.installed is not None and set(state.waiting) != waiting:
            raise Wrong(f"after {after}: waiting for {state.waiting}, expected {sorted(waiting)}")
        for name, function in self.fake.answers().items():
            if name != "by name" or not self.stale:
                self.call(after, name, function, self.installed if ours else "theirs")

    def call(self, after, name, function, who):
        x, bound = self.rng.randrange(100), self.rng.choice((2.0, 0.5, None))
        ways = [((x,), {}, 2.0), ((x, bound), {}, bound), ((x,), {"bound": bound}, bound)]
        ways += [((), {"bound": bound, "x": x}, bound)]
        args, kwargs, given = self.rng.choice(ways) if name != "step" else ((x,), {}, None)
        expected = (who, x) if name == "step" else (who, x, given)
        found = function(*args, **kwargs)
        if found != expected:
            raise Wrong(f"after {after}: {name}(*{args}, **{kwargs}) answered {found}, expected {expected}")

    def end(self):
        self.do_uninstall()
        self.check("uninstall at the end")
        left = [finder for finder in sys.meta_path if type(finder).__module__ == after_import.__name__]
        if left:
            raise Wrong("a finder is left in sys.meta_path")


def attempt(action):
    """Return what an action raised, or None."""
    try:
        action()
    except Exception as error:  # noqa: BLE001  # whatever it is, it is compared with what was expected
        return error
    return None


def attack(seed):
    """Make one framework and some twelve steps with it."""
    rng = random.Random(seed)
    paths, made = list(sys.path), None
    with tempfile.TemporaryDirectory(prefix="peer") as name:
        folder = Path(name)
        sys.path.insert(0, name)
        try:
            made = Attempt(rng, folder)
            for _ in range(rng.randint(4, 16)):
                made.step()
            made.end()
        except Wrong as error:
            return Outcome("wrong", str(error))
        finally:
            sys.path[:] = paths
            for path in [path for path in sys.path_importer_cache if path.startswith(name)]:
                del sys.path_importer_cache[path]
            if made is not None:
                made.drop_in.uninstall()
                made.fake.forget()
    return Outcome("refused", made.said) if made.said else Outcome("right")


AREA = Area("dropins", "frameworks", attack, count=3_000, few=20)
