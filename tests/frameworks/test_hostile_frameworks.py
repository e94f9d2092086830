"""Drop-ins beside frameworks that do not fit, that load in odd ways, or that are not the ones they seem to be."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

from builders import fake_frameworks
from builders.fake_frameworks import FITTING, METHODS, MISFITS, Target, ours
from rollout_corr.frameworks.shared import after_import
from rollout_corr.frameworks.shared.dropin import DropIn
from rollout_corr.frameworks.shared.origin import lacks, origin_of


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A function that makes a framework called peer and its drop-in; both are gone without a trace afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    found = []

    def make(**kinds):
        fake = fake_frameworks.write(tmp_path, "peer", **kinds)
        importlib.invalidate_caches()
        found.append((fake, fake.drop_in()))
        return found[-1]

    yield make
    for fake, drop_in in found:
        drop_in.uninstall()
        fake.forget()
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == after_import.__name__]


def load(fake, *parts):
    return [importlib.import_module(f"{fake.name}.{part}") for part in parts or ("helper", "losses", "trainer")]


def all_are(fake, who):
    """Whether every way to a function answers "ours" or "theirs", with the arguments."""
    return all(function(7)[:2] == (who, 7) for function in fake.answers().values())


def refusal(action):
    with pytest.raises(RuntimeError) as caught:
        action()
    return str(caught.value)


# --- signatures ---


@pytest.mark.parametrize("kind", FITTING)
def test_what_fits(kind, made):
    fake, drop_in = made(helper=kind, losses=kind)
    assert not drop_in.install(fake.targets).active
    load(fake)
    assert drop_in.installed().active and all_are(fake, "ours")
    drop_in.uninstall()
    assert all_are(fake, "theirs")


@pytest.mark.parametrize("first", ["install", "import"])
@pytest.mark.parametrize("kind", MISFITS)
def test_what_does_not_fit(kind, first, made, caplog):
    """The third function fails last, after two fit: an error in words, and nothing is replaced."""
    fake, drop_in = made(losses=kind)
    load(fake, "helper", "trainer")
    if first == "install":
        drop_in.install(fake.targets)
        assert drop_in.installed().active and all_are(fake, "ours")
        said = refusal(lambda: load(fake, "losses"))
        assert refusal(lambda: load(fake, "losses")) == said
        assert MISFITS[kind].words in caplog.text
    else:
        load(fake, "losses")
        said = refusal(lambda: drop_in.install(fake.targets))
    assert said.startswith("peer.losses.correct of peer 1.0 ") and MISFITS[kind].words in said
    assert "Nothing of peer is replaced" in said and "install a version that was compared (1.0)" in said
    state = drop_in.installed()
    assert not state.active and state.replaced == () and MISFITS[kind].words in state.why
    assert all_are(fake, "theirs")


@pytest.mark.parametrize("kind", [kind for kind in METHODS if METHODS[kind].words])
def test_methods_that_do_not_fit(kind, made):
    fake, drop_in = made(method=kind)
    load(fake, "helper")
    drop_in.install(fake.targets)
    assert METHODS[kind].words in refusal(lambda: load(fake, "trainer"))
    assert not drop_in.installed().active and all_are(fake, "theirs")
    assert drop_in.installed().replaced == ()


def test_a_compiled_function_fits(made):
    fake, drop_in = made()
    helper, *_ = load(fake)
    helper.correct = torch.compile(helper.correct)
    drop_in.install(fake.targets)
    assert drop_in.installed().active and helper.correct(7) == ("ours", 7, 2.0)


def test_swapped_parameters_of_equal_names(made):
    """The case of the review: what is called by position would land in the wrong parameter."""
    made(helper="right")
    (helper,) = [importlib.import_module("peer.helper")]
    exec("def weigh(response_mask, log_ratio): return 'theirs'", vars(helper))
    drop_in = DropIn("peer", ("1.0",))
    target = Target("peer.helper", "weigh", lambda log_ratio, response_mask: None)
    said = refusal(lambda: drop_in.install((target,)))
    assert "takes (response_mask, log_ratio), expected (log_ratio, response_mask)" in said
    assert helper.weigh(1, 2) == "theirs" and not drop_in.installed().active


def test_another_signature_that_is_known(made):
    """A version with another order is called by name; what its own order says stays true."""
    fake, drop_in = made(helper="reordered")
    (helper,) = load(fake, "helper")

    def known(bound, x=2.0):
        """Parameters of another version."""

    drop_in.install((Target("peer.helper", "correct", ours, also=(known,)),))
    assert helper.correct(1, 2) == helper.correct(1, x=2) == ("ours", 2, 1)
    with pytest.raises(TypeError, match="multiple values"):
        helper.correct(1, bound=2)


# --- all or none ---


def test_a_class_that_refuses_assignments(made):
    """The assignment of the third raises: the two before are taken back."""
    fake, drop_in = made(refuses=True)
    load(fake)
    said = refusal(lambda: drop_in.install(fake.targets))
    assert "peer.trainer.Trainer.step of peer 1.0 could not be replaced (TypeError: this class is immutable)" in said
    assert all_are(fake, "theirs") and not drop_in.installed().active
    assert "this class is immutable" in drop_in.installed().why


def test_a_class_that_refuses_later(made):
    fake, drop_in = made(refuses=True)
    load(fake, "helper")
    drop_in.install(fake.targets)
    for _ in range(2):
        assert "immutable" in refusal(lambda: load(fake, "trainer"))
        assert not drop_in.installed().active and all_are(fake, "theirs")


def test_what_others_kept_goes_back_too(made):
    """A closure that holds ours calls the framework's again after uninstall, and after a refusal."""
    fake, drop_in = made(losses="renamed")
    (helper,) = load(fake, "helper")
    drop_in.install(fake.targets)
    kept = functools.partial(helper.correct, 7)
    assert kept() == ("ours", 7, 2.0)
    refusal(lambda: load(fake, "losses"))
    assert kept() == ("theirs", 7, 2.0)


def test_a_class_that_refuses_to_be_restored(made, caplog):
    fake, drop_in = made()
    *_, trainer = load(fake)
    drop_in.install(fake.targets)
    refusing = type("Frozen", (type(trainer.Trainer),), {"__delattr__": None, "__setattr__": None})
    trainer.Trainer.__class__ = refusing
    drop_in.uninstall()
    assert trainer.Trainer().step(7) == ("theirs", 7) and "could not restore peer.trainer.Trainer.step" in caplog.text


def test_a_refused_installation_leaves_the_one_before(made):
    fake, drop_in = made(losses="renamed")
    load(fake)
    drop_in.install(fake.targets[:1], note="first")
    refusal(lambda: drop_in.install(fake.targets))
    state = drop_in.installed()
    assert state.active and "the last install() changed nothing: peer.losses.correct" in state.why
    assert fake.answers()["by name"](7) == ("first", 7, 2.0)
    with pytest.raises(ImportError):
        importlib.import_module("peer.nothing")


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
    """What a module had before its reload is still held by name elsewhere, and is ours again too."""
    fake, drop_in = made()
    drop_in.install(fake.targets)
    helper, *_ = load(fake)
    importlib.reload(helper)
    drop_in.install(fake.targets, note="other")
    assert drop_in.installed().active and all_are(fake, "other")
    drop_in.uninstall()
    assert all_are(fake, "theirs")


def test_reloading_that_fails(made, tmp_path):
    """What it got to is new, and replaced."""
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


# --- which framework it is ---


def distribution(folder, version, direct=None):
    info = folder / f"peer-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: peer\nVersion: {version}\n")
    if direct is not None:
        (info / "direct_url.json").write_text(direct)


def test_a_checkout_beside_an_installed_distribution(made, tmp_path, monkeypatch, caplog):
    """What is imported is the checkout, and the metadata are of something else."""
    fake, drop_in = made(version="1.1.dev")
    distribution(tmp_path / "site", "1.0")
    monkeypatch.syspath_prepend(tmp_path / "site")
    state = drop_in.install(fake.targets)
    assert (state.version, state.checked, state.location) == (None, False, str(tmp_path / "peer"))
    load(fake)
    state = drop_in.installed()
    assert (state.version, state.checked) == ("1.1.dev", False)
    said = [record.getMessage() for record in caplog.records if "was not checked" in record.getMessage()]
    assert any("peer 1.1.dev at" in text and "the installed distribution 1.0 lies elsewhere" in text for text in said)
    drop_in.install(fake.targets, note="again")
    assert len([record for record in caplog.records if "was not checked" in record.getMessage()]) == len(said)


def test_a_module_that_repeats_the_metadata_of_another(made, tmp_path, monkeypatch):
    """As TRL does: its `__version__` is the distribution's, also in a checkout beside it."""
    fake, drop_in = made(version="1.0")
    distribution(tmp_path / "site", "1.0")
    monkeypatch.syspath_prepend(tmp_path / "site")
    load(fake)
    assert not drop_in.install(fake.targets).checked


@pytest.mark.parametrize("editable", [False, True])
def test_an_installed_distribution(editable, made, tmp_path, monkeypatch):
    fake, drop_in = made()
    site, direct = tmp_path, None
    if editable:
        site, direct = tmp_path / "site", f'{{"url": "{tmp_path.as_uri()}", "dir_info": {{"editable": true}}}}'
    distribution(site, "1.0", direct)
    monkeypatch.syspath_prepend(site)
    state = drop_in.install(fake.targets)
    assert (state.version, state.checked, origin_of("peer").foreign) == ("1.0", True, False)


def test_a_framework_without_the_module(made, tmp_path, caplog):
    """As xtuner's 0.2.0 of the package index, which has no xtuner/v1: refused before anything is imported."""
    fake, drop_in = made()
    (tmp_path / "peer/losses.py").unlink()
    said = refusal(lambda: drop_in.install(fake.targets))
    assert f"at {tmp_path / 'peer'} has no module peer.losses" in said and "peer" not in sys.modules
    assert not drop_in.installed().active and said in drop_in.installed().why
    assert lacks("peer.helper") is None and lacks("peer.losses.more") == "peer.losses"


def test_what_is_covered_is_said(made):
    fake, _ = made()
    drop_in = DropIn("peer", ("1.0",), not_covered={"AsyncTrainer": None, "losses": "peer.losses"})
    load(fake)
    state = drop_in.install(fake.targets)
    assert state.covered == tuple(target.path for target in fake.targets)
    assert state.not_covered == ("AsyncTrainer",) and state.why.endswith("; not covered: AsyncTrainer")
    assert drop_in.install(fake.targets[:1]).not_covered == ("AsyncTrainer", "losses")
    drop_in.uninstall()


def test_an_unknown_version_is_said_once(made, caplog):
    fake, drop_in = made(version="9.9")
    drop_in.install(fake.targets)
    load(fake)
    for _ in range(3):
        assert not drop_in.installed().checked
        fake.answers()["by name"](7)
    said = [r for r in caplog.records if r.levelno == logging.WARNING and "peer 9.9" in r.getMessage()]
    assert len(said) == 1
