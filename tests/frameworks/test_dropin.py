"""How a framework's functions are replaced and restored: on a small framework made for this, and for every drop-in."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import rollout_corr as rc
from builders.fake_frameworks import FITTING, METHODS, MISFITS, RIGHT, ours
from frameworks.calls import put
from rollout_corr.frameworks.shared import imports
from rollout_corr.frameworks.shared.dropin import DropIn, Target

ROOT = Path(__file__).resolve().parents[2]
ALL = {"helper", "registry", "losses", "static", "by name", "method"}


def refusal(action):
    """Give what the RuntimeError of an action says."""
    with pytest.raises(RuntimeError) as caught:
        action()
    return str(caught.value)


def all_are(fake, who):
    """Tell whether every way to a function that there can be is answered by `who`."""
    answers = fake.answers()
    return answers.keys() == ALL and set(answers.values()) == {who}


# --- installing and restoring ---


def test_replaces_everywhere(made, tmp_path, caplog):
    """Where it is defined, where it was imported by name before and after, in a registry; and back again."""
    fake, drop_in = made()
    helper, _, trainer = fake.load()
    theirs = [dict(vars(x)) for x in (helper, trainer, trainer.Base, trainer.Trainer)]
    status = drop_in.install(fake.targets)
    assert status.in_place and status.version == "1.0" and status.checked and status.waiting == ()
    (tmp_path / "peer/worker.py").write_text("from peer.helper import correct\n")
    (worker,) = fake.load("worker")
    assert worker.correct(7, 3.0) == helper.correct(7, bound=3.0) == ("ours", 7, 3.0) and all_are(fake, "ours")
    assert drop_in.installed().replaced == (
        "peer.helper.REGISTRY['correct']",
        "peer.helper.correct",
        "peer.losses.correct",
        "peer.trainer.Base.fixed",
        "peer.trainer.Trainer.step",
        "peer.trainer.imported",
        "peer.worker.correct",
    )
    kept = functools.partial(helper.correct, 7)
    drop_in.uninstall()
    assert [dict(vars(x)) for x in (helper, trainer, trainer.Base, trainer.Trainer)] == theirs
    assert worker.correct is helper.correct is theirs[0]["correct"] and kept()[0] == "theirs"
    assert all_are(fake, "theirs") and "install() was not called" in drop_in.installed().why
    assert not caplog.records


def test_waits_for_the_import(made):
    """Nothing is imported for the sake of being replaced; what is imported later is replaced before anyone sees it."""
    fake, drop_in = made()
    status = drop_in.install(fake.targets, note="mine")
    assert "peer" not in sys.modules and not status.in_place
    assert status.waiting == ("peer.helper", "peer.losses", "peer.trainer")
    assert status.why.endswith("waiting for the import of peer.helper, peer.losses, peer.trainer")
    for module in fake.load():
        assert type(module.__loader__).__module__ != imports.__name__
        assert module.__spec__.loader is module.__loader__
    assert all_are(fake, "mine") and drop_in.installed().in_place and drop_in.installed().waiting == ()


def test_uninstalled_before_the_import(made):
    fake, drop_in = made()
    drop_in.install(fake.targets)
    drop_in.uninstall()
    fake.load()
    assert all_are(fake, "theirs")


def test_a_method_that_is_inherited(made):
    """It is put into the class and taken out of it again."""
    fake, drop_in = made(method="inherited")
    *_, trainer = fake.load()
    drop_in.install(fake.targets)
    assert trainer.Trainer().step(1) == ("ours", 1) and trainer.Base().step(1) == ("theirs", 1)
    drop_in.uninstall()
    assert "step" not in vars(trainer.Trainer) and all_are(fake, "theirs")


def test_installed_again(made):
    """The same switches change nothing, others replace what was installed; the state says what the switches are."""
    fake, drop_in = made()
    helper, *_ = fake.load()
    drop_in.install(fake.targets)
    first = helper.correct
    assert drop_in.install(fake.targets).in_place and helper.correct is first
    assert drop_in.install(fake.targets, note="again").switches == {"note": "again"} and all_are(fake, "again")
    drop_in.uninstall()
    drop_in.uninstall()
    assert all_are(fake, "theirs")


def test_looks_like_the_original(made):
    """Same name, documentation and signature; a pickle is a reference to the framework's name."""
    fake, drop_in = made()
    helper, *_ = fake.load()
    helper.mine = ours
    drop_in.install(fake.targets)
    assert (helper.correct.__module__, helper.correct.__qualname__) == ("peer.helper", "correct")
    assert pickle.loads(pickle.dumps(helper.correct)) is helper.correct
    drop_in.uninstall()
    assert helper.mine is ours


@pytest.mark.parametrize("reload", [False, True])
def test_what_somebody_else_replaced_or_reloaded(reload, made):
    """`installed()` looks, it does not remember; a further install is refused, and what others put there stays."""
    fake, drop_in = made()
    drop_in.install(fake.targets)
    helper, *_ = fake.load()
    if reload:
        importlib.reload(helper)
    else:
        helper.correct = lambda x, bound=2.0: ("other", x)
    other = helper.correct
    assert not drop_in.installed().in_place and "other code has replaced or reloaded" in drop_in.installed().why
    said = refusal(lambda: drop_in.install(fake.targets))
    assert said.startswith("peer.helper.correct was replaced or reloaded by other code since the last install(); call")
    drop_in.uninstall()
    assert helper.correct is other
    assert drop_in.install(fake.targets).in_place and helper.correct(7)[0] == "ours"


def test_odd_imports(made, tmp_path):
    """One module raises at first, one is needed by another before its end."""
    fake, drop_in = made()
    broken = "import pathlib\nif not pathlib.Path(__file__).with_name('mended').exists(): raise OSError('broken')\n"
    (tmp_path / "peer/helper.py").write_text(broken + (tmp_path / "peer/helper.py").read_text())
    (tmp_path / "peer/circle.py").write_text("from peer.losses import correct\n")
    (tmp_path / "peer/losses.py").write_text(RIGHT + "import peer.circle\n")
    drop_in.install(fake.targets)
    with pytest.raises(OSError, match="broken"):
        fake.load("helper")
    (tmp_path / "peer/mended").touch()
    fake.load()
    assert all_are(fake, "ours") and drop_in.installed().in_place
    assert sys.modules["peer.circle"].correct(7)[0] == "ours"


# --- what is refused ---


@pytest.mark.parametrize("kind", FITTING)
def test_what_fits(kind, made):
    fake, drop_in = made(losses=kind)
    drop_in.install(fake.targets)
    _, losses, _ = fake.load()
    assert drop_in.installed().in_place and all_are(fake, "ours")
    drop_in.uninstall()
    assert all_are(fake, "theirs") and ("correct" in vars(losses)) == (kind != "looked up when asked")


@pytest.mark.parametrize(
    ("part", "kind", "first"),
    [("losses", kind, "import") for kind in MISFITS]
    + [("trainer", kind, "import") for kind in METHODS if METHODS[kind][1]]
    + [("losses", "reordered", "install"), ("trainer", "static", "install")],
)
def test_what_does_not_fit(part, kind, first, made, caplog):
    """An error in words, at every import or at the installation, and nothing of the framework is ours, kept or not."""
    fake, drop_in = made(**{"losses": kind} if part == "losses" else {"method": kind})
    words, name = fake.misfits[part], "losses.correct" if part == "losses" else "trainer.Trainer.step"
    (helper,) = fake.load("helper")
    if first == "install":
        drop_in.install(fake.targets)
        kept = functools.partial(helper.correct, 7)
        assert drop_in.installed().in_place and kept()[0] == "ours"
        said = refusal(lambda: fake.load(part))
        assert words in caplog.text and kept()[0] == "theirs" and f"peer.{part}" not in sys.modules
        fake.load()
    else:
        fake.load()
        said = refusal(lambda: drop_in.install(fake.targets))
    assert said.startswith(f"peer.{name} of peer 1.0 ") and words in said
    assert said.endswith("Nothing of peer is replaced by this: rollout_corr.frameworks.peer serves peer 1.0")
    state = drop_in.installed()
    assert not state.in_place and state.replaced == () and words in state.why
    assert set(fake.answers().values()) == {"theirs"}


def test_a_refused_installation_leaves_the_one_before(made):
    fake, drop_in = made(losses="renamed")
    fake.load()
    drop_in.install(fake.targets[:1], note="first")
    refusal(lambda: drop_in.install(fake.targets))
    state = drop_in.installed()
    assert state.in_place and "the last install() changed nothing: peer.losses.correct" in state.why
    assert fake.answers()["by name"] == "first"


def test_half_imported_modules(made, tmp_path):
    """By the code that calls install(): refused, with the line to write."""
    fake, drop_in = made()
    sys.modules["peer_calls"] = SimpleNamespace(install=lambda: drop_in.install(fake.targets))
    (tmp_path / "peer/losses.py").write_text(f"import peer_calls\npeer_calls.install()\n{RIGHT}")
    expected = "peer.losses is being imported; call rollout_corr.frameworks.peer.install() before that import begins"
    try:
        assert expected in refusal(lambda: fake.load("losses"))
    finally:
        del sys.modules["peer_calls"]
    assert not drop_in.installed().in_place and expected in drop_in.installed().why


def test_what_is_missing(made, tmp_path):
    """The framework, or a module: xtuner's 0.2.0 of the package index has no xtuner/v1. Nothing is imported."""
    with pytest.raises(ImportError, match="expected the package 'no_such_framework' in this environment"):
        DropIn("no_such_framework", ()).install(())
    fake, drop_in = made({"checked": ("1.0", "1.1"), "advice": ", not 0.9"})
    (tmp_path / "peer/losses.py").unlink()
    said = refusal(lambda: drop_in.install((*fake.targets, Target("peer.losses.more", "f", ours))))
    assert f"peer at {tmp_path / 'peer'} has no module peer.losses. " in said and "peer" not in sys.modules
    assert said.endswith("rollout_corr.frameworks.peer serves peer 1.0, 1.1, not 0.9")
    assert not drop_in.installed().in_place and said in drop_in.installed().why


# --- what is said ---


def distribution(folder, version, direct=None):
    info = folder / f"peer-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: peer\nVersion: {version}\n")
    if direct is not None:
        (info / "direct_url.json").write_text(json.dumps(direct))


def warnings_of(caplog):
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [text for text in found if "was not checked" in text]


def test_an_unknown_version_is_said_once(made, caplog):
    fake, drop_in = made({"checked": ("0.8", "0.9")})
    drop_in.install(fake.targets)
    fake.load()
    drop_in.install(fake.targets, note="again")
    (said,) = warnings_of(caplog)
    assert "rollout-corr: peer 1.0 at " in said and "peer was not checked, only 0.8, 0.9 for" in said
    assert "signatures of the functions are compared: peer.helper.correct" in said
    assert not drop_in.installed().checked


@pytest.mark.parametrize("version", ["1.0", "1.1.dev"])
def test_a_checkout_beside_an_installed_distribution(version, made, tmp_path, monkeypatch, caplog):
    """Python imports the checkout, the metadata are the distribution's; TRL's `__version__` repeats those anyway."""
    fake, drop_in = made(version=version)
    distribution(tmp_path / "site", "1.0")
    monkeypatch.syspath_prepend(tmp_path / "site")
    state = drop_in.install(fake.targets)
    assert (state.version, state.checked, state.location) == (None, False, str(tmp_path / "peer"))
    fake.load()
    assert (drop_in.installed().version, drop_in.installed().checked) == (version, False)
    (said,) = warnings_of(caplog)
    assert f"peer {version} at" in said and "the installed distribution 1.0 lies elsewhere" in said


@pytest.mark.parametrize("editable", [False, True])
def test_an_installed_distribution(editable, made, tmp_path, monkeypatch, caplog):
    fake, drop_in = made()
    site = tmp_path / "site" if editable else tmp_path
    distribution(site, "1.0", {"url": tmp_path.as_uri(), "dir_info": {"editable": True}} if editable else None)
    monkeypatch.syspath_prepend(site)
    state = drop_in.install(fake.targets)
    assert (state.version, state.checked) == ("1.0", True) and not warnings_of(caplog)


def test_what_is_covered_is_said(made):
    fake, drop_in = made({"not_covered": {"AsyncTrainer": None, "losses": "peer.losses"}})
    assert drop_in.installed().not_covered == ()
    fake.load()
    state = drop_in.install(fake.targets)
    assert state.covered == tuple(target.path for target in fake.targets)
    assert state.not_covered == ("AsyncTrainer",) and state.why.endswith("; not covered: AsyncTrainer")
    assert drop_in.install(fake.targets[:1]).not_covered == ("AsyncTrainer", "losses")


# --- every drop-in ---


# The frameworks' own parameters of the functions that are replaced. A drop-in accepts no function with others.
PARAMETERS = {
    "RolloutImportanceSampling.compute_rollout_importance_weights_and_metrics": (
        "self, old_log_prob, rollout_log_prob, num_tokens, response_mask"
    ),
    "AsyncGRPOTrainer.compute_loss": "self, model, inputs, return_outputs=False, num_items_in_batch=None",
    "PolicyLoss.forward": (
        "self, log_probs, old_log_probs, advantages, action_mask=None, rollout_log_probs=None, dp_size=1, "
        "batch_num_tokens=None, global_batch_size=None"
    ),
    "GRPOTrainer._generate_and_score_completions": "self, inputs",
    "GRPOTrainer.get_off_policy_mask": (
        "advantages, per_token_logps, sampling_per_token_logps, mask, off_policy_threshold"
    ),
    "apply_off_policy_correction": "loss, old_log_probs, rollout_logprobs, loss_mask, off_policy_correction",
    "apply_rejection_sampling": "proximal_logprobs, old_logprobs, loss_mask, cu_seqlens, config",
    "calculate_debug_metrics": "data",
    "compute_off_policy_correction": "old_log_probs, rollout_logprobs, loss_mask, off_policy_correction",
    "compute_offpolicy_metrics": "old_log_prob, rollout_log_prob, response_mask",
    "compute_rollout_corr_metrics_from_logprobs": "log_prob, rollout_log_prob, response_mask",
    "compute_rollout_correction_and_add_to_batch": "batch, rollout_corr_config",
    "compute_rollout_correction_and_rejection_mask": (
        "old_log_prob, rollout_log_prob, response_mask, rollout_is=None, rollout_is_threshold=2.0, "
        "rollout_is_batch_normalize=False, rollout_rs=None, rollout_rs_threshold=None"
    ),
    "compute_rollout_correction_weights": (
        "log_ratio, response_mask, rollout_is='token', rollout_is_threshold=2.0, rollout_is_batch_normalize=False"
    ),
    "compute_rollout_rejection_mask": "log_ratio, response_mask, rollout_rs='token_k1', rollout_rs_threshold=None",
    "merge_rollout_is_metrics": "rollout_is_metrics, device='cuda'",
}
OF_LOSSES = "{}, log_prob, advantages, response_mask, loss_agg_mode='{}', config=None, rollout_is_weights=None"
MODES = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "reinforce": "seq-mean-token-sum"}


def parameters_of(name):
    """The framework's own parameters of a function that is replaced."""
    start, _, kind = name.partition("compute_policy_loss_")
    if kind and not start:
        old = "rollout_log_prob" if kind == "reinforce" else "old_log_prob"
        return OF_LOSSES.format(old, MODES.get(kind, "token-mean"))
    return PARAMETERS[name]


FRAMEWORKS = ("areal", "openrlhf", "skyrl", "trl", "verl", "xtuner")
INSTALLATIONS = [
    ("areal", {}, 1),
    ("openrlhf", {"spec": rc.Spec()}, 1),
    ("skyrl", {"padding": "skip"}, 2),
    ("trl", {"spec": rc.Spec(), "delta": 4.0}, 3),
    ("verl", {}, 7),
    ("verl", {"losses": True}, 16),
    ("xtuner", {"merge": "pooled", "empty_rows": "skip"}, 2),
]


def drop_in_of(framework):
    return importlib.import_module(f"rollout_corr.frameworks.{framework}.dropin")


@pytest.mark.parametrize(("framework", "switches", "count"), INSTALLATIONS, ids=str)
def test_every_drop_in_replaces_and_restores(framework, switches, count, monkeypatch):
    """All of its functions, by their full names, in modules that have the framework's signatures."""
    module = drop_in_of(framework)
    monkeypatch.setitem(sys.modules, framework, ModuleType(framework))
    try:
        module.install(**switches)
        targets = module.DROP_IN.targets
        module.uninstall()

        def made(target):
            space = {}
            exec(f"def made({parameters_of(target.name)}): return 'theirs'", space)
            return space["made"]

        theirs = put(targets, made, monkeypatch)
        status = module.install(**switches)
        assert status.in_place and set(theirs) == set(status.replaced) and len(theirs) == count
        for holder, name, original in theirs.values():
            assert getattr(holder, name).__wrapped__ is original
        # All but what chooses the functions themselves is handed to each of them.
        handed = {key: value for key, value in switches.items() if key not in ("losses", "merge")}
        assert handed.items() <= status.switches.items()
    finally:
        module.uninstall()
    assert all(getattr(holder, name) is original for holder, name, original in theirs.values())


@pytest.mark.parametrize(
    ("framework", "switch"),
    [(name, switch) for name in FRAMEWORKS for switch in inspect.signature(drop_in_of(name).install).parameters],
)
def test_every_drop_in_checks_its_switches(framework, switch):
    with pytest.raises(
        (TypeError, ValueError), match=f"^{switch}: expected .*, got .*else|^spec: expected a Spec or None"
    ):
        drop_in_of(framework).install(**{switch: "something.else"})


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_releases_that_are_served_are_listed(framework):
    lines = (ROOT / "docs/integrations.md").read_text(encoding="utf-8").splitlines()
    (listed,) = (line for line in lines if line.lower().startswith(f"| {framework} "))
    assert all(version in listed for version in drop_in_of(framework).DROP_IN.checked), listed


# The most modules of ours that a process may hold after the first call.
MODULES = {"verl": 80, "skyrl": 80, "xtuner": 80}


def test_importing_changes_nothing(tmp_path):
    """No framework is imported, no finder is added, nothing is logged; a first call loads few modules."""
    code = """
import sys
import torch
before = set(sys.modules), list(sys.meta_path)
import importlib, logging, os, pkgutil
from types import ModuleType, SimpleNamespace
x, mask = torch.zeros(2, 3), torch.ones(2, 3)

def alone(call):
    # In a process of its own, which has imported torch already.
    if not (child := os.fork()):
        logging.disable()
        call()
        print(call.__name__, sum(name.partition(".")[0] == "rollout_corr" for name in sys.modules), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

def drop_in(name):
    sys.modules[name] = ModuleType(name)
    importlib.import_module(f"rollout_corr.frameworks.{name}").install()
    return importlib.import_module(f"rollout_corr.frameworks.{name}.dropin")

def verl():
    given = x, x, mask, None, None, False, "token_k1", 2.0
    drop_in("verl").compute_rollout_correction_and_rejection_mask(*given)

def skyrl():
    drop_in("skyrl").compute_off_policy_correction(x, x, mask, SimpleNamespace(tis_ratio_type="token"))

def xtuner():
    config, packed = SimpleNamespace(rollout_is_threshold=(2.0, 0.5)), (x[:1], x[:1], [3], mask[:1].long())
    drop_in("xtuner").compute_rollout_importance_weights_and_metrics(config, *packed)

for call in (verl, skyrl, xtuner):
    alone(call)
import rollout_corr.frameworks as frameworks
found = [module.name for module in pkgutil.walk_packages(frameworks.__path__, "rollout_corr.frameworks.")]
assert "rollout_corr.frameworks.verl.dropin" in found
for name in found:
    importlib.import_module(name)
added = {name.partition(".")[0] for name in set(sys.modules) - before[0]}
print(sorted(added - set(sys.stdlib_module_names) - {"rollout_corr", "torch", "__editable___rollout_corr"}))
assert sys.meta_path == before[1]
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    *counts, added = done.stdout.splitlines()
    assert (added, done.stderr) == ("[]", "")
    loaded = {name: int(count) for name, count in map(str.split, counts)}
    assert all(loaded[name] <= most for name, most in MODULES.items()), loaded
