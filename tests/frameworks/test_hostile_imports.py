"""Drop-ins beside frameworks that load in odd ways: again, lazily, from a zip, by threads, while they import."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import shutil
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from builders.fake_frameworks import FITTING, MISFITS, all_are, load, refusal
from rollout_corr.frameworks.shared import after_import

# --- ways to be imported ---


def test_a_module_that_fits_after_it_did_not(made, tmp_path):
    """Mended on disk and imported again: everything is replaced."""
    fake, drop_in = made(losses="renamed")
    load(fake, "helper")
    drop_in.install(fake.targets)
    refusal(lambda: load(fake, "losses"))
    load(fake, "trainer")
    assert not drop_in.installed().active and all_are(fake, "theirs")
    (tmp_path / "peer/losses.py").write_text("# a comment\n" + FITTING["right"].source)
    importlib.invalidate_caches()
    load(fake, "losses")
    assert drop_in.installed().active and all_are(fake, "ours")


def test_reloaded(made, tmp_path):
    """New functions of a reloaded module are replaced too, and all of them given back."""
    fake, drop_in = made()
    drop_in.install(fake.targets)
    helper, *_ = load(fake)
    for _ in range(2):
        importlib.reload(helper)
        assert drop_in.installed().active and all_are(fake, "ours")
        assert type(helper.__loader__).__module__ != after_import.__name__
    (tmp_path / "peer/helper.py").write_text("# another size\n" + MISFITS["reordered"].source)
    importlib.invalidate_caches()
    said = refusal(lambda: importlib.reload(helper))
    assert "which stands elsewhere" in said and not drop_in.installed().active
    assert all(function(7, 2.0)[0] == "theirs" for name, function in fake.answers().items() if name != "step")
    drop_in.uninstall()
    assert helper.correct(1, 2) == ("theirs", 2, 1)


def test_installed_anew_after_a_reload(made):
    """Functions of before a reload, held by name in other modules, are replaced again too."""
    fake, drop_in = made()
    drop_in.install(fake.targets)
    helper, *_ = load(fake)
    importlib.reload(helper)
    drop_in.install(fake.targets, note="other")
    assert drop_in.installed().active and all_are(fake, "other")
    drop_in.uninstall()
    assert all_are(fake, "theirs")


def test_reloading_that_fails(made, tmp_path):
    """A reload that fails half-way leaves new functions up to there, and these are replaced."""
    fake, drop_in = made()
    drop_in.install(fake.targets)
    helper, *_ = load(fake)
    source = (tmp_path / "peer/helper.py").read_text()
    (tmp_path / "peer/helper.py").write_text(source + "raise OSError('half')\n")
    importlib.invalidate_caches()
    with pytest.raises(OSError, match="half"):
        importlib.reload(helper)
    assert drop_in.installed().active and all_are(fake, "ours")


def test_a_module_that_raises_at_first(made, tmp_path):
    fake, drop_in = made(raises=True)
    drop_in.install(fake.targets)
    load(fake, "helper")
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            load(fake, "losses")
        assert drop_in.installed().waiting == ("peer.losses", "peer.trainer")
    (tmp_path / "peer/broken").unlink()
    load(fake)
    assert drop_in.installed().active and drop_in.installed().waiting == () and all_are(fake, "ours")


def test_imported_from_the_middle_of_itself(made, tmp_path):
    """A circle: another module takes the function by name before its module is complete."""
    fake, drop_in = made()
    (tmp_path / "peer/circle.py").write_text("from peer.losses import correct\n")
    with (tmp_path / "peer/losses.py").open("a") as file:
        file.write("import peer.circle\n")
    drop_in.install(fake.targets)
    load(fake)
    assert sys.modules["peer.circle"].correct(7) == ("ours", 7, 2.0) and drop_in.installed().active


def test_installed_from_the_middle_of_an_import(made, tmp_path):
    """By the module itself: it is not complete, and that is said."""
    fake, drop_in = made()
    sys.modules["peer_drop_in"] = SimpleNamespace(install=lambda: drop_in.install(fake.targets))
    path = tmp_path / "peer/losses.py"
    path.write_text("import sys\nsys.modules['peer_drop_in'].install()\n" + path.read_text())
    try:
        assert "is being imported by the code that calls install()" in refusal(lambda: load(fake, "losses"))
    finally:
        del sys.modules["peer_drop_in"]
    assert not drop_in.installed().active and "is being imported" in drop_in.installed().why


def test_installed_while_another_thread_imports(made, tmp_path):
    """`install` waits until the module is complete."""
    fake, drop_in = made()
    begun, goes_on = threading.Event(), threading.Event()
    sys.modules["peer_events"] = SimpleNamespace(begun=begun, goes_on=goes_on)
    path = tmp_path / "peer/losses.py"
    wait = "import sys\nsys.modules['peer_events'].begun.set()\nsys.modules['peer_events'].goes_on.wait(20)\n"
    path.write_text(wait + path.read_text())
    importing = threading.Thread(target=load, args=(fake, "losses"))
    importing.start()
    try:
        assert begun.wait(20)
        threading.Timer(0.2, goes_on.set).start()
        drop_in.install(fake.targets)
    finally:
        goes_on.set()
        importing.join(20)
        del sys.modules["peer_events"]
    assert drop_in.installed().active and all_are(fake, "ours")


def test_imported_by_threads_at_once(made):
    fake, drop_in = made()
    drop_in.install(fake.targets)
    gate, failed = threading.Barrier(8), []

    def one(order):
        gate.wait(20)
        try:
            load(fake, *order)
            if not all_are(fake, "ours"):
                failed.append(order)
        except Exception as error:  # noqa: BLE001  # a thread's exception would be lost
            failed.append(error)

    parts = ["helper", "losses", "trainer"]
    threads = [threading.Thread(target=one, args=(parts[i % 3 :] + parts[: i % 3],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == [] and drop_in.installed().active and all_are(fake, "ours")


def test_modules_appear_while_places_are_searched(made):
    """As another thread's import does it: in the middle of a loop over sys.modules, at a collection of garbage."""
    fake, drop_in = made()
    load(fake)
    appeared = []

    def appear(phase, info):
        name = f"appeared_{len(appeared)}"
        sys.modules[name] = sys
        appeared.append(name)

    before = gc.get_threshold()
    gc.callbacks.append(appear)
    gc.set_threshold(1)
    try:
        drop_in.install(fake.targets)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(appear)
        for name in appeared:
            del sys.modules[name]
    assert appeared and drop_in.installed().active and all_are(fake, "ours")


@pytest.mark.slow
def test_a_search_beside_an_import(made):
    """Somebody's find_spec in another thread does not let a module slip through."""
    fake, drop_in = made()
    load(fake, "helper")
    drop_in.install(fake.targets)
    inside, goes_on = threading.Event(), threading.Event()

    class Slow:
        @staticmethod
        def find_spec(name, path, target=None):
            if name == "peer.losses" and threading.current_thread() is not threading.main_thread():
                inside.set()
                goes_on.wait(20)

    sys.meta_path.append(Slow)
    sys.meta_path.insert(1, Slow)
    searching = threading.Thread(target=importlib.util.find_spec, args=("peer.losses",))
    try:
        searching.start()
        assert inside.wait(20)
        load(fake, "losses")
    finally:
        goes_on.set()
        searching.join(20)
        sys.meta_path.remove(Slow)
        sys.meta_path.remove(Slow)
    assert drop_in.installed().active and all_are(fake, "ours")


@pytest.mark.parametrize("first", ["install", "lazy"])
def test_loaded_lazily(first, made):
    """By importlib.util.LazyLoader: replaced at the first use, which `install` is not."""
    fake, drop_in = made()
    load(fake, "helper", "trainer")

    def lazy():
        spec = importlib.util.find_spec("peer.losses")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        sys.modules["peer.losses"] = module
        spec.loader.exec_module(module)

    if first == "lazy":
        lazy()
    drop_in.install(fake.targets)
    if first == "install":
        lazy()
    assert drop_in.installed().waiting == ("peer.losses",)
    assert sys.modules["peer.losses"].correct(7) == ("ours", 7, 2.0)
    assert drop_in.installed().active and drop_in.installed().waiting == ()


@pytest.mark.parametrize("first", ["install", "import"])
def test_a_module_that_puts_another_object_in_its_place(first, made, tmp_path):
    fake, drop_in = made()
    with (tmp_path / "peer/losses.py").open("a") as file:
        file.write("import sys, types\nclass Other(types.ModuleType): pass\nother = Other(__name__)\n")
        file.write("other.correct = correct\nsys.modules[__name__] = other\n")
    if first == "import":
        load(fake)
    drop_in.install(fake.targets)
    load(fake)
    assert type(sys.modules["peer.losses"]).__name__ == "Other"
    assert drop_in.installed().active and all_are(fake, "ours")
    drop_in.uninstall()
    assert all_are(fake, "theirs")


def test_functions_that_a_module_looks_up_when_asked(made, tmp_path):
    """A module's own `__getattr__`: the function lies in another one."""
    fake, drop_in = made()
    (tmp_path / "peer/_inner.py").write_text(FITTING["right"].source)
    lazy = "def __getattr__(name):\n    import peer._inner\n    return getattr(peer._inner, name)\n"
    (tmp_path / "peer/losses.py").write_text(lazy)
    drop_in.install(fake.targets)
    load(fake)
    assert sys.modules["peer._inner"].correct(7) == ("ours", 7, 2.0) and all_are(fake, "ours")
    drop_in.uninstall()
    assert "correct" not in vars(sys.modules["peer.losses"]) and all_are(fake, "theirs")


def test_another_module_in_its_place(made):
    """Put there by hand after the installation: not ours, and `installed` says so; a second install helps."""
    fake, drop_in = made()
    load(fake)
    drop_in.install(fake.targets)
    other = ModuleType("peer.losses")
    exec(FITTING["right"].source, vars(other))
    sys.modules["peer.losses"] = other
    state = drop_in.installed()
    assert not state.active and "peer.losses.correct" in state.why
    assert drop_in.install(fake.targets).active and other.correct(7) == ("ours", 7, 2.0)
    sys.modules["peer.losses"] = None
    assert drop_in.installed().active and drop_in.installed().waiting == ("peer.losses",)
    del sys.modules["peer.losses"]
    load(fake)
    assert drop_in.installed().active and all_are(fake, "ours")


def test_a_module_that_slips_past_the_finders(made, tmp_path):
    """Executed by hand: it is in the process and not ours. Before, `installed` looked at what it had replaced alone."""
    fake, drop_in = made()
    drop_in.install(fake.targets)
    load(fake, "helper")
    spec = importlib.util.spec_from_file_location("peer.losses", tmp_path / "peer/losses.py")
    sys.modules["peer.losses"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["peer.losses"])
    assert not drop_in.installed().active and "peer.losses.correct" in drop_in.installed().why
    assert drop_in.install(fake.targets).active and fake.answers()["peer.losses.correct"](7) == ("ours", 7, 2.0)


def test_from_a_zip(made, tmp_path, monkeypatch):
    fake, drop_in = made()
    archive = shutil.make_archive(str(tmp_path / "peer"), "zip", tmp_path, "peer")
    shutil.rmtree(tmp_path / "peer")
    monkeypatch.syspath_prepend(archive)
    importlib.invalidate_caches()
    drop_in.install(fake.targets)
    load(fake)
    assert drop_in.installed().active and all_are(fake, "ours")
    importlib.reload(sys.modules["peer.helper"])
    assert drop_in.installed().active and all_are(fake, "ours")


def test_in_a_process_of_its_own(made, tmp_path):
    """As a worker of Ray: the hook first, the framework later, and a module that does not fit more than once."""
    fake, _ = made(losses="reordered")
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from builders.fake_frameworks import Fake
fake = Fake({fake.name!r}, {{}})
drop_in = fake.drop_in()
drop_in.install(fake.targets)
import peer.helper
said = []
for _ in range(3):
    try:
        import peer.losses
    except RuntimeError as error:
        said.append(str(error))
    state = drop_in.installed()
    print(len(said), state.active, state.replaced, peer.helper.correct(1)[0], "peer.losses" in sys.modules)
assert len(set(said)) == 1 and said[0] in state.why
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:3] == [f"{n} False () theirs False" for n in (1, 2, 3)], done.stderr
