"""Drop-ins beside frameworks that do not fit, or that are not the ones that they seem to be."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys

import pytest
import torch

from builders.fake_frameworks import FITTING, METHODS, MISFITS, Target, all_are, load, ours, refusal
from rollout_corr.frameworks.shared.dropin import DropIn
from rollout_corr.frameworks.shared.origin import lacks, origin_of

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


# --- which framework it is ---


def distribution(folder, version, direct=None):
    info = folder / f"peer-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: peer\nVersion: {version}\n")
    if direct is not None:
        (info / "direct_url.json").write_text(direct)


def test_a_checkout_beside_an_installed_distribution(made, tmp_path, monkeypatch, caplog):
    """Python imports the checkout, while the metadata are those of the installed distribution."""
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
