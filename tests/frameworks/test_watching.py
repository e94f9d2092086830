"""What every drop-in does apart from correcting: warnings to the log, dumps, the user's Spec and backend."""

from __future__ import annotations

import inspect
import logging
from concurrent.futures import wait
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import yaml

import rollout_corr as rc
from builders.config_cases import error, rows
from frameworks.calls import CALLS, MASK, ROLLOUT, TRAIN, DataProto, by_skyrl, by_verl, drop_in_of
from rollout_corr.diagnose.doctor.diagnosis import diagnose
from rollout_corr.diagnose.measure.measurement import measure
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.frameworks.shared import watching
from rollout_corr.frameworks.shared.dropin import Installed
from rollout_corr.frameworks.shared.watching import Dumps, Speaker

pytestmark = pytest.mark.usefixtures("frameworks_there")

# Rejects most sequences of these log-probs, weighs no token by more than 1.1.
SPEC = rc.Spec(
    weight=rc.Weight.token(upper=1.1),
    criteria=(rc.Criterion("abs", over="sequence", reduce="mean", upper=0.3),),
)


@pytest.fixture
def watched(monkeypatch):
    """Give a function that sets what looks at a drop-in's corrections; all is as before afterwards."""

    def watch(name, dumps=None, speaks=True):
        dropin = drop_in_of(name)
        monkeypatch.setattr(dropin.DROP_IN, "_said", set())
        monkeypatch.setattr(dropin.DROP_IN, "_told", set())
        monkeypatch.setattr(dropin.DROP_IN, "speaker", Speaker(lambda: "it 1.0") if speaks else None)
        monkeypatch.setattr(dropin.DROP_IN, "dumps", dumps)
        return dropin

    return watch


# --- warnings ---


def heard(caplog):
    """The number of the correction and the words of every warning about one."""
    found = [record.getMessage().partition(", correction ")[2] for record in caplog.records]
    return [(int(said.partition(": ")[0]), said.partition(": ")[2]) for said in found if said]


@pytest.mark.parametrize("name", CALLS)
def test_a_warning_comes_once_and_again_after_a_hundred_corrections(name, watched, caplog, monkeypatch):
    assert watching.AGAIN == 100
    monkeypatch.setattr(watching, "AGAIN", 3)
    dropin = watched(name)
    healthy = ROLLOUT + 1e-3
    for step in range(6):
        # The numbers in the sentence are others in each step.
        CALLS[name](dropin, healthy if step == 0 else TRAIN * (1.0 + 1e-4 * step))
    said = [step for step, words in heard(caplog) if words.startswith(("kl_rollout_train_k3 is", "watch: kl"))]
    assert said == [1, 4]
    assert "rollout-corr in it 1.0, correction 1: " in caplog.text and caplog.text.count("each warning comes once") == 1
    caplog.clear()
    CALLS[name](watched(name, speaks=False), TRAIN)
    assert not heard(caplog)


def test_what_rejects_more_than_half_says_so_at_once(watched, caplog):
    given = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
    by_verl(watched("verl"), ROLLOUT * 0.8, **given)
    (words,) = [words for step, words in heard(caplog) if "rejected" in words or "are kept" in words]
    assert "every token is rejected" in words and heard(caplog)[0][0] == 0


def test_statistics_on_their_way_are_not_waited_for(caplog):
    """They are read, in order, when a later correction finds that they have arrived."""

    class Pending:
        def __init__(self):
            self.arrived = False

        def done(self):
            return self.arrived

        def warnings(self):
            assert self.arrived, "waited"
            return [f"word {'a' * (4 - self.number)} {self.number}"]

    speaker, steps = Speaker(lambda: "it"), [Pending() for _ in range(4)]
    for number, pending in enumerate(steps):
        pending.number = number
        speaker.hear(pending)
        if number == 2:
            assert not heard(caplog)
            steps[0].arrived = steps[2].arrived = True
    assert [step for step, _ in heard(caplog)] == [0]
    steps[1].arrived = steps[3].arrived = True
    speaker.finish()
    assert [step for step, _ in heard(caplog)] == [0, 1, 2, 3]


def test_a_rank_names_itself(watched, caplog, monkeypatch):
    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 1)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    by_skyrl(watched("skyrl"), TRAIN)
    assert "rollout-corr in it 1.0, correction 0, rank 1: kl_rollout_train_k3 is" in caplog.text


def test_install_silences(made, caplog):
    fake, drop_in = made()
    out = rc.correct(TRAIN, ROLLOUT, mask=MASK)
    for warnings in (True, False):
        drop_in.install(fake.targets, warnings=warnings)
        drop_in.seen(out.metrics_async(), TRAIN, ROLLOUT, MASK)
        assert bool(heard(caplog)) is warnings
        assert ("install(warnings=False) silences them" in caplog.text) is warnings
        caplog.clear()


# --- a Spec and a backend ---


@pytest.mark.parametrize(
    "name", [name for name in CALLS if name not in ("verl, metrics", "trl, asynchronous", "slime")]
)
def test_a_spec_stands_in_place_of_the_configuration(name, watched):
    out = rc.correct(TRAIN, ROLLOUT, mask=MASK, spec=SPEC)
    assert 0 < out.keep.sum() < 4
    weights, mask, metrics = CALLS[name](watched(name), TRAIN, spec=SPEC)
    if name == "trl":
        # What is rejected has the ratio 0 there.
        assert torch.equal(weights, torch.where(out.mask != 0, out.weights, 0.0))
    elif name != "openrlhf":
        assert torch.equal(weights, out.weights) and torch.equal(mask != 0, out.mask != 0)
    if name == "areal":
        assert metrics["filtered"] == pytest.approx(1.0 - out.metrics()["tokens_kept_fraction"])
    if name == "openrlhf":
        of_all = out.metrics()
        assert metrics["vllm_kl"] == pytest.approx(of_all["kl_rollout_train_k1"])
        assert metrics["is_filter_ratio"] == pytest.approx(1.0 - of_all["tokens_kept_fraction"])


@pytest.mark.parametrize("name", ["verl", "skyrl", "xtuner"])
def test_which_of_our_metrics_are_logged(name, watched):
    """The ten of the dashboard, the default, or all; the framework's own keys and numbers are the same either way."""
    out = rc.correct(TRAIN, ROLLOUT, mask=MASK, spec=SPEC)
    theirs = []
    for names, switches in (
        ("dashboard", {}),
        ("dashboard", {"metrics": "dashboard"}),
        ("native", {"metrics": "native"}),
    ):
        metrics = CALLS[name](watched(name), TRAIN, spec=SPEC, **switches)[2]
        ours = out.metrics(names, prefix="rollout_corr/")
        assert {key: metrics.pop(key) for key in ours} == ours
        theirs.append(metrics)
    assert theirs[0] == theirs[1] == theirs[2] and len(theirs[0]) >= 5
    assert not [key for key in theirs[0] if key.removeprefix("rollout_corr/") in out.metrics()]


@pytest.mark.parametrize("name", [name for name in CALLS if name != "slime"])
def test_the_backend_is_handed_on(name, watched):
    with pytest.raises(ValueError, match=r"backend: expected one of .*, got 'mine'"):
        CALLS[name](watched(name), TRAIN, backend="mine")


@pytest.mark.parametrize("name", ["areal", "openrlhf", "skyrl", "trl", "verl", "xtuner"])
def test_a_spec_that_needs_more_than_the_framework_has_is_refused(name):
    switches = inspect.signature(drop_in_of(name).install).parameters
    assert {"spec", "backend", "warnings", "dump", "every"} <= switches.keys()
    if name not in ("areal", "openrlhf"):  # which log none of ours
        assert switches["metrics"].default == "dashboard"
    install = drop_in_of(name).install
    with pytest.raises(ValueError, match=f"^spec: expected one that needs no turns, which {name} does not pass"):
        install(spec=rc.Spec(turns=True))
    gated = rc.Spec(criteria=(rc.Criterion("abs", upper=1.0, when="negative_advantage"),))
    refused = {"trl": ImportError, "openrlhf": ImportError}.get(name, ValueError)  # these two have advantages
    with pytest.raises(refused, match=r"needs no advantages|expected the package"):
        install(spec=gated)


def test_errors_of_the_switches(made):
    fake, drop_in = made()
    whole = r"every: expected a whole number >= 1, got "
    for path, every, said in (
        ("x.csv", 1, "dump: expected a name"),
        *(("x", every, f"{whole}{every}") for every in (0, -1, True, 1.5)),
        (None, 5, "every: expected dump="),
    ):
        with pytest.raises(ValueError, match=said):
            drop_in.install(fake.targets, path, every)
    with pytest.raises(
        TypeError, match=r"spec: expected a Spec or None, got str 'verl.x'; rc.spec\('verl.x'\) makes one"
    ):
        drop_in.install(fake.targets, spec="verl.x")
    with pytest.raises(ValueError, match="backend: expected one of"):
        drop_in.install(fake.targets, backend="cuda")
    assert drop_in.installed().switches == {} and not drop_in.installed().waiting


# --- settings ---


def test_unknown_settings_are_named_once(watched, caplog):
    """A typing mistake with what was meant; a setting of a newer release without."""
    dropin = watched("verl")
    batch = {"old_log_probs": TRAIN, "rollout_log_probs": ROLLOUT, "response_mask": MASK}
    config = {"rollout_is": "token", "rollout_is_treshold": 3.0, "bypass_mode": False, "_target_": "x", "novel": 1}
    for _ in range(2):
        data = DataProto(batch=dict(batch))
        dropin.compute_rollout_correction_and_add_to_batch(data, config)
    said = sorted(text for text in caplog.messages if "unknown setting" in text)
    assert [text.partition("unknown ")[2] for text in said] == [
        "setting 'novel' has no effect",
        "setting 'rollout_is_treshold' has no effect (did you mean 'rollout_is_threshold'?)",
    ]
    skyrl = watched("skyrl")
    found = skyrl.compute_off_policy_correction(TRAIN, ROLLOUT, MASK, {"tis_ratio_type": "token", "geo_mask_hihg": 1.0})
    assert found[0] is not None and "'geo_mask_hihg' has no effect (did you mean 'geo_mask_high'?)" in caplog.text
    flags = SimpleNamespace(tis_upper_bond=3.0, tis_clip=2.0, lr=1e-3)
    dropin.DROP_IN.name_unknown(flags, ["tis_upper_bound", "tis_lower_bound"], 0.85)
    assert "'tis_upper_bond' has no effect (did you mean 'tis_upper_bound'?)" in caplog.text
    assert "'lr'" not in caplog.text and "'tis_clip'" not in caplog.text


def test_the_state_is_short():
    """Also of many places and modules; the fields have all of it, and a line each says what is not covered."""
    many = tuple(f"framework.package.subpackage.module_{i}.function" for i in range(40))
    switches = {"spec": SPEC, "backend": "torch", "note": "x" * 200}
    missing = "the losses", "the samples"
    why = f"{'framework 1.0 uses ' * 9}; later"
    last = "your Spec is not used: vllm_importance_sampling_correction is off"
    state = Installed(True, why, False, last, "1.0", many, many, switches, None, True, many, missing)
    assert len(repr(state)) <= 500 and repr(state).endswith(f"not covered  the losses\n{' ' * 13}the samples")
    assert "module_0.function and 39 more, replaced when imported" in repr(state) and state.waiting == many
    short = state._replace(why="framework 1.0 uses ours; later", waiting=(), switches={}, not_covered=())
    assert repr(short).splitlines() == [
        "replaced     yes: framework 1.0 uses ours",
        "active       no, at the last call: your Spec is not used: vllm_importance_sampling_correction is",
        "             off",
        "waiting      -",
        "switches     -",
        "not covered  -",
    ]


# --- whether batches are corrected ---


def said_of_batches(caplog):
    """The level and the words of every line that says whether the correction is active."""
    found = [(record.levelname, record.getMessage().partition("correction active: ")[2]) for record in caplog.records]
    return [(level, words) for level, words in found if words]


OFF = (
    '{is_correction_level: "off", is_correction_mode: mask, is_correction_gating: ratio, is_correction_threshold: [1]}'
)
# FRAMEWORK SETTINGS | what is said of the batch.
SAID = f"""
verl {{rollout_is: token, rollout_is_threshold: 1.2, rollout_rs: token_k1, rollout_rs_threshold: 2.0}} |
    yes, rollout_is 'token' with threshold 1.2 and rollout_rs 'token_k1' with threshold 2.0
verl {{}} | no, metrics only: neither rollout_is nor rollout_rs is set
verl {{rollout_is: token, rollout_is_threshold: null}} |
    no, metrics only: rollout_is is 'token', but rollout_is_threshold is None
skyrl {{tis_ratio_type: token}} | yes, tis_ratio_type='token'
skyrl {{tis_ratio_type: null}} | no, off_policy_correction switches nothing on
skyrl {{token_mask_is_threshold_low: 0.5}} | no, token_mask_is_threshold_low works only together with the other bound
xtuner {{rollout_is_threshold: [1.5, 0.7], rollout_is_veto_threshold: [1.9, 0.5]}} |
    yes, rollout_is_level 'token', rollout_is_mode 'truncate', threshold (1.5, 0.7), veto (1.9, 0.5)
xtuner {{rollout_is_veto_threshold: [20.0, 0.0]}} |
    no, metrics only: rollout_is_threshold is None, which switches the mask and the veto off too
areal {{upper: 1.1}} | yes, ratio at the level token, mask, bounds [None, 1.1]
openrlhf {OFF} | no, is_correction_level is off
slime {{use_tis: false}} | no, metrics only: --use-tis is off
"""
# FRAMEWORK SETTINGS | the error that a reader makes too.
REFUSED = """
verl {rollout_is: geometric} | rollout_is: expected null, 'token' or 'sequence'
verl {rollout_is: token, rollout_is_threshold: true} | TypeError not a boolean
verl {rollout_is: token, rollout_is_threshold: .nan} | rollout_is_threshold
verl {rollout_rs: token_k1} | rollout_rs_threshold: expected a threshold
trl {mode: word} | vllm_importance_sampling_mode: expected one of
skyrl {tis_ratio_type: word} | tis_ratio_type: expected null or one of
xtuner {rollout_is_level: word} | rollout_is_level: expected one of
areal {action: clamp, metric: kl_k1} | action: expected 'mask' with metric 'kl_k1', as AReaL does
areal {level: word} | level: expected one of
slime {tis_level: word} | tis_level: expected one of
slime {rs_level: word} | rs_level: expected one of
slime {tis_mode: word} | tis_mode: expected one of
slime {tis_upper_bound: 0.0} | tis_upper_bound: expected a number > 0
"""


@pytest.mark.parametrize(("given", "words"), rows(SAID))
def test_what_becomes_of_a_batch_is_said_once(given, words, watched, caplog):
    name, _, settings = given.partition(" ")
    dropin = watched(name)
    for _ in range(2):
        CALLS[name](dropin, TRAIN, settings=yaml.safe_load(settings))
    ((_, said),) = said_of_batches(caplog)
    assert said == words


@pytest.mark.parametrize(("given", "message"), rows(REFUSED))
def test_wrong_settings(given, message, watched):
    name, _, settings = given.partition(" ")
    kind, pattern = error(message)
    with pytest.raises(kind or ValueError, match=pattern):
        CALLS[name](watched(name), TRAIN, settings=yaml.safe_load(settings))


def test_every_install_says_anew_what_becomes_of_batches(made, caplog):
    """Once for each answer, also if a second installation is the same as the first."""
    _, drop_in = made()
    for spec in (None, SPEC, SPEC):
        drop_in.install((), spec=spec)
        for _ in range(2):
            drop_in.say_skipped("its switch is off")
    unused = "no, your Spec is not used: its switch is off"
    assert said_of_batches(caplog) == [("WARNING", words) for words in ("no, its switch is off", unused, unused)]


def test_the_state_tells_replaced_from_active(made):
    """Functions that are in place may correct nothing; before the first call, and after `uninstall`, nobody knows."""
    fake, drop_in = made()
    fake.load()
    state = drop_in.install(fake.targets)
    assert (state.in_place, state.active, state.last) == (True, None, "")
    assert "\nactive       no call in this process yet\n" in repr(state)
    drop_in.say(False, "its switch is off")
    state = drop_in.installed()
    assert (state.in_place, state.active, state.last) == (True, False, "its switch is off")
    assert repr(state).startswith("replaced     yes: peer 1.0 uses the functions of rollout-corr in 6 places\n")
    assert "\nactive       no, at the last call: its switch is off\n" in repr(state)
    drop_in.say(True, "everything")
    assert drop_in.installed().active and "active       yes, at the last call: everything" in repr(drop_in.installed())
    drop_in.uninstall()
    assert drop_in.installed().active is None


def test_a_spec_that_changes_nothing_is_not_called_active(made, caplog):
    _, drop_in = made()
    for spec in (rc.Spec(), SPEC, rc.Spec(weight=rc.Weight.token(), apply=False)):
        drop_in.say_spec(spec)
    measures, corrects, dry = (words for _, words in said_of_batches(caplog))
    assert measures == "no, Spec() measures only" and corrects == f"yes, {SPEC!r}"
    assert dry == "no, dry run of Spec(weight=Weight.token(), apply=False)"


@pytest.mark.parametrize(
    ("logger_takes", "handler_takes", "level"),
    [("INFO", "INFO", "INFO"), ("INFO", "ERROR", "WARNING"), ("WARNING", "INFO", "WARNING")],
)
def test_good_news_has_the_level_info_where_that_is_shown(logger_takes, handler_takes, level, made, monkeypatch):
    """That nothing is corrected is a warning everywhere."""
    _, drop_in = made()
    logger, seen = logging.getLogger("rollout_corr"), []
    for name, value in (
        ("level", logging.getLevelName(logger_takes)),
        ("handlers", [logging.NullHandler(handler_takes)]),
        ("filters", [lambda record: seen.append(record.levelname) or True]),
        ("propagate", False),
    ):
        monkeypatch.setattr(logger, name, value)
    monkeypatch.setattr(logger, "_cache", {})
    drop_in.say(True, "all of it")
    drop_in.say(False, "off")
    assert seen == [level, "WARNING"]


# --- dumps ---


@pytest.fixture
def dumped(monkeypatch):
    """The steps and the futures of all calls of `dump`; each has been written, or has failed, when the call returns."""
    api_dump = import_module("rollout_corr.api.dump")
    calls, dump = [], api_dump.dump

    def recorder(*given, **named):
        future = dump(*given, **named)
        wait([future])
        calls.append((named["step"], future))
        return future

    monkeypatch.setattr(api_dump, "dump", recorder)
    return calls


@pytest.mark.parametrize("name", CALLS)
def test_every_so_many_corrections_are_written(name, tmp_path, watched, dumped):
    folder = tmp_path / "dumps"
    dropin = watched(name, Dumps(folder, 2))
    for _ in range(4):
        CALLS[name](dropin, TRAIN)
    CALLS[name](watched(name), TRAIN)  # off: nothing more is written
    assert [(step, future.result()) for step, future in dumped] == [(0, 4), (2, 4)]
    measured = measure(Dump(folder))
    assert measured.metrics()["sequences"] == 8
    assert [finding.name for finding in diagnose(measured)] == ["shifted"]


def test_verl_s_responses_are_written(tmp_path, watched, dumped):
    dropin = watched("verl", Dumps(tmp_path / "dumps", 1))
    ids = torch.arange(240).view(4, 60)
    batch = {"old_log_probs": TRAIN, "rollout_log_probs": ROLLOUT, "response_mask": MASK, "responses": ids}
    dropin.compute_rollout_correction_and_add_to_batch(DataProto(batch=batch), {})
    batch["responses"] = ids[:, :3]  # ids that do not fit cost no dump
    dropin.compute_rollout_correction_and_add_to_batch(DataProto(batch=batch), {})
    assert [future.result() for _, future in dumped] == [4, 4]
    first, second = map(torch.load, sorted((tmp_path / "dumps").glob("*.pt")))
    assert torch.equal(first["token_ids"], ids) and "token_ids" not in second


def test_install_turns_them_on_and_off(made, tmp_path, dumped):
    fake, drop_in = made()
    seen = rc.correct(TRAIN, ROLLOUT, mask=MASK).metrics_async(), TRAIN, ROLLOUT, MASK
    drop_in.install(fake.targets, tmp_path / "dumps", 1)
    drop_in.seen(*seen)
    assert len(dumped) == 1
    drop_in.install(fake.targets)
    drop_in.seen(*seen)
    drop_in.install(fake.targets, tmp_path / "dumps", 1)
    drop_in.uninstall()
    drop_in.seen(*seen)
    assert [future.result() for _, future in dumped] == [4]


def test_a_dump_that_cannot_be_made_ends_and_nothing_else(tmp_path, caplog):
    dumps = Dumps(tmp_path / "x", 1)
    for _ in range(2):
        dumps.seen(TRAIN, ROLLOUT[:2], MASK)
    assert len(caplog.records) == 1 and "is off: " in caplog.text and not (tmp_path / "x").exists()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_folder_that_cannot_be_written_ends_it(tmp_path, caplog, dumped):
    (tmp_path / "file").touch()
    dumps = Dumps(tmp_path / "file" / "x", 1)
    for _ in range(2):
        dumps.seen(TRAIN, ROLLOUT, MASK)
    assert len(dumped) == 1 and caplog.text.count("is off: ") == 1
