"""How a framework's functions are replaced and restored: on a small framework made for this, and for every drop-in."""

from __future__ import annotations

import importlib
import inspect
import logging
import pickle
import subprocess
import sys
from types import ModuleType

import pytest

import rollout_corr as rc
from rollout_corr.frameworks.shared import after_import
from rollout_corr.frameworks.shared.dropin import DropIn, Target

SOURCES = {
    "__init__": "__version__ = '1.0'",
    "helper": """
def correct(x, bound=2.0):
    return ("theirs", x, bound)

def other(x):
    return ("other", correct(x))

REGISTRY = {"correct": correct, "else": other}
""",
    "trainer": """
from toy.helper import correct, other as renamed

class Base:
    def step(self, x):
        return ("base", x)

    @staticmethod
    def fixed(x, bound=2.0):
        return ("fixed", x)

class Trainer(Base):
    def run(self, x):
        return correct(x)
""",
    "worker": "from toy.helper import correct",
}


def ours(x, bound=2.0, *, note="ours"):
    return (note, x, bound)


def stepping(original, *, note="ours"):
    def step(self, x):
        return (note, original(self, x))

    return step


HELPER = (Target("toy.helper", "correct", ours),)
BOTH = (*HELPER, Target("toy.trainer", "Trainer.step", stepping, takes_original=True))


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A package called toy, not imported yet, and gone without a trace afterwards."""
    folder = tmp_path / "toy"
    folder.mkdir()
    for name, source in SOURCES.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy"]:
        del sys.modules[name]
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == after_import.__name__]


@pytest.fixture
def drop_in(toy):
    made = DropIn("toy", ("1.0",))
    yield made
    made.uninstall()


def names(*wanted):
    return [importlib.import_module(f"toy.{name}") for name in wanted]


def test_replaces_everywhere(drop_in, caplog):
    """Where it is defined, where it was imported by name before and after, in a registry; and back again."""
    helper, trainer = names("helper", "trainer")
    theirs = dict(vars(helper)), dict(vars(trainer)), dict(helper.REGISTRY)
    status = drop_in.install(HELPER)
    assert status.active and status.version == "1.0" and status.waiting == ()
    (worker,) = names("worker")
    for called in (helper.correct, trainer.correct, worker.correct, helper.REGISTRY["correct"], trainer.Trainer().run):
        assert called(3) == ("ours", 3, 2.0)
    assert helper.other(3) == trainer.renamed(3) == ("other", ("ours", 3, 2.0))
    assert drop_in.installed().replaced == (
        "toy.helper.REGISTRY['correct']",
        "toy.helper.correct",
        "toy.trainer.correct",
        "toy.worker.correct",
    )
    drop_in.uninstall()
    assert (dict(vars(helper)), dict(vars(trainer)), dict(helper.REGISTRY)) == theirs
    assert worker.correct is helper.correct is theirs[0]["correct"]
    assert not drop_in.installed().active and "install() was not called" in drop_in.installed().why
    assert not caplog.records


def test_waits_for_the_import(drop_in):
    """Nothing is imported for the sake of being replaced; what is imported later is replaced before anyone sees it."""
    status = drop_in.install(BOTH)
    assert "toy" not in sys.modules and not status.active
    assert status.waiting == ("toy.helper", "toy.trainer") and status.why.endswith(
        "not imported yet: toy.helper, toy.trainer"
    )
    helper, trainer = names("helper", "trainer")
    assert helper.correct(1) == trainer.correct(1) == ("ours", 1, 2.0)
    assert drop_in.installed().active and drop_in.installed().waiting == ()
    for module in (helper, trainer):
        assert type(module.__loader__).__module__ != after_import.__name__
        assert module.__spec__.loader is module.__loader__


def test_uninstalled_before_the_import(drop_in):
    drop_in.install(BOTH)
    drop_in.uninstall()
    (helper,) = names("helper")
    assert helper.correct(1) == ("theirs", 1, 2.0)


def test_methods(drop_in):
    """A method that a class inherits is put into the class and taken out of it again."""
    (trainer,) = names("trainer")
    drop_in.install(BOTH, note="mine")
    assert trainer.Trainer().step(1) == ("mine", ("base", 1)) and trainer.Base().step(1) == ("base", 1)
    assert "toy.trainer.Trainer.step" in drop_in.installed().replaced
    drop_in.uninstall()
    assert "step" not in vars(trainer.Trainer) and trainer.Trainer().step(1) == ("base", 1)
    own = (
        Target("toy.trainer", "Base.step", stepping, takes_original=True),
        Target("toy.trainer", "Base.fixed", ours),
    )
    before = dict(vars(trainer.Base))
    drop_in.install(own)
    assert trainer.Trainer().step(1) == ("ours", ("base", 1))
    assert trainer.Trainer().fixed(1) == trainer.Base.fixed(1) == ("ours", 1, 2.0)
    drop_in.uninstall()
    assert dict(vars(trainer.Base)) == before and trainer.Trainer().fixed(1) == ("fixed", 1)


def test_is_idempotent(drop_in):
    (helper,) = names("helper")
    before = helper.correct
    drop_in.install(HELPER)
    first = helper.correct
    assert drop_in.install(HELPER).active and helper.correct is first
    drop_in.install(HELPER, note="again")
    assert helper.correct(1) == ("again", 1, 2.0)
    drop_in.uninstall()
    drop_in.uninstall()
    assert helper.correct is before


def test_what_a_user_imported_from_us_stays(drop_in):
    """A function of ours that somebody imported for himself is no replacement, and is not taken away."""
    (helper,) = names("helper")
    helper.mine = ours
    drop_in.install(HELPER)
    drop_in.uninstall()
    assert helper.mine is ours


def test_looks_like_the_original(drop_in):
    """Same name, documentation and signature; a pickle is a reference to the framework's name."""
    (helper,) = names("helper")
    drop_in.install(HELPER)
    replaced = helper.correct
    assert (replaced.__module__, replaced.__qualname__) == ("toy.helper", "correct")
    assert pickle.loads(pickle.dumps(replaced)) is replaced


def test_somebody_else_replaced_it(drop_in):
    """`installed()` looks, it does not remember; and what others put there is left alone."""
    (helper,) = names("helper")
    drop_in.install(HELPER)
    helper.correct = len
    assert not drop_in.installed().active and "other code has replaced" in drop_in.installed().why
    drop_in.uninstall()
    assert helper.correct is len


def test_missing_framework(monkeypatch):
    with pytest.raises(ImportError, match="expected the package 'no_such_framework' in this environment"):
        DropIn("no_such_framework", ()).install(HELPER)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Target("toy.helper", "gone", ours), r"toy.helper.gone of toy 1.0 is missing. Nothing of toy is replaced"),
        (
            Target("toy.helper", "correct", len),
            r"toy.helper.correct of toy 1.0 takes \(x, bound=2.0\), expected \(obj, /\)",
        ),
    ],
)
def test_another_framework_than_expected(target, expected, drop_in):
    """A function that is missing or takes something else: an error, and the good ones are not replaced either."""
    (helper,) = names("helper")
    with pytest.raises(RuntimeError, match=expected):
        drop_in.install((*HELPER, target))
    assert helper.correct(1) == ("theirs", 1, 2.0) and not drop_in.installed().active


def test_unknown_version_warns(drop_in, caplog):
    drop_in.checked = ("0.8", "0.9")
    names("helper")
    for _ in range(2):
        drop_in.install(HELPER)
        drop_in.uninstall()
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    said = record.getMessage()
    assert "rollout-corr: toy 1.0 at " in said and "toy was not checked, only 0.8, 0.9 for" in said
    assert "signatures of the functions are compared: toy.helper.correct" in said


def test_says_it_once(drop_in, caplog):
    names("helper")
    for _ in range(3):
        drop_in.say(True, "weights")
    drop_in.say(False, "nothing is set")
    assert [record.getMessage() for record in caplog.records] == [
        "rollout-corr in toy 1.0: correction active: yes, weights",
        "rollout-corr in toy 1.0: correction active: no, nothing is set",
    ]


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
    "compute_is_metrics": (
        "rollout_is_weights, raw_rollout_is_weights, log_ratio_for_metrics, response_mask, rollout_is, "
        "rollout_is_threshold, rollout_is_threshold_lower=None"
    ),
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
    "compute_rollout_importance_weights": (
        "old_log_prob, rollout_log_prob, num_tokens, response_mask, rollout_is_level='token', "
        "rollout_is_mode='truncate', rollout_is_threshold=None, rollout_is_mask_threshold=None, "
        "rollout_is_veto_threshold=None"
    ),
    "compute_rollout_rejection_mask": "log_ratio, response_mask, rollout_rs='token_k1', rollout_rs_threshold=None",
    "compute_rs_metrics": (
        "option_name, rs_statistic, response_mask, seq_valid_mask, *, level, per_sequence_values, "
        "rollout_rs_threshold, rollout_rs_threshold_lower, apply_lower_threshold"
    ),
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


INSTALLATIONS = [
    ("areal", {}, 1),
    ("openrlhf", {"spec": rc.Spec()}, 1),
    ("skyrl", {"padding": "skip"}, 2),
    ("trl", {"spec": rc.Spec(), "delta": 4.0}, 3),
    ("verl", {}, 9),
    ("verl", {"losses": True}, 18),
    ("verl", {"compat": "0.7"}, 4),
    ("xtuner", {"merge": "pooled", "empty_rows": "skip"}, 3),
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
        theirs = {}
        for target in targets:
            made = sys.modules.get(target.module) or ModuleType(target.module)
            monkeypatch.setitem(sys.modules, target.module, made)
            owner, _, name = target.name.rpartition(".")
            if owner:
                vars(made).setdefault(owner, type(owner, (), {}))
            holder, space = (getattr(made, owner) if owner else made), {}
            exec(f"def {name}({parameters_of(target.name)}): return 'theirs'", space)
            static = target.name == "GRPOTrainer.get_off_policy_mask"
            setattr(holder, name, staticmethod(space[name]) if static else space[name])
            theirs[target.path] = holder, name, space[name]
        status = module.install(**switches)
        assert status.active and set(theirs) == set(status.replaced) and len(theirs) == count
        for holder, name, original in theirs.values():
            assert getattr(holder, name).__wrapped__ is original
        # All but what chooses the functions themselves is handed to each of them.
        handed = {key: value for key, value in switches.items() if key not in ("losses", "compat", "merge")}
        assert handed.items() <= status.switches.items()
    finally:
        module.uninstall()
    assert all(getattr(holder, name) is original for holder, name, original in theirs.values())


@pytest.mark.parametrize(
    ("framework", "switch"),
    [
        (name, switch)
        for name in ("areal", "openrlhf", "skyrl", "trl", "verl", "xtuner")
        for switch in inspect.signature(drop_in_of(name).install).parameters
    ],
)
def test_every_drop_in_checks_its_switches(framework, switch):
    with pytest.raises(
        (TypeError, ValueError), match=f"^{switch}: expected .*, got .*else|^spec: expected a Spec or None"
    ):
        drop_in_of(framework).install(**{switch: "something.else"})


def test_importing_changes_nothing(tmp_path):
    """No framework is imported, no finder is added, nothing is logged."""
    code = """
import sys
import torch
before = set(sys.modules), list(sys.meta_path)
import importlib, pkgutil
import rollout_corr.frameworks as frameworks
found = [module.name for module in pkgutil.walk_packages(frameworks.__path__, "rollout_corr.frameworks.")]
assert "rollout_corr.frameworks.verl.dropin" in found
for name in found:
    if not name.endswith(("__main__", "xtuner.subclass")):  # the subclass needs the class that it is made of
        importlib.import_module(name)
added = {name.partition(".")[0] for name in set(sys.modules) - before[0]}
print(sorted(added - set(sys.stdlib_module_names) - {"rollout_corr", "torch", "__editable___rollout_corr"}))
assert sys.meta_path == before[1]
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
