"""The drop-in in verl 0.9.1 itself: its own tests pass with it, and its functions and ours agree (make test-peers)."""

from __future__ import annotations

import importlib
import math
import pickle
import subprocess
import sys
import textwrap
from types import ModuleType

import pytest
import torch

from builders.verl_cases import SHAPES, batch, close, configurations, verls
from rollout_corr.frameworks.verl import dropin as drop_in
from rollout_corr.frameworks.verl import losses

pytestmark = pytest.mark.peers

OWN_TESTS = ("tests.trainer.ppo.test_rollout_corr", "tests.trainer.ppo.test_rollout_corr_integration")


@pytest.fixture
def helper():
    """verl's module, with its own functions whatever a test leaves behind."""
    yield importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    drop_in.uninstall()


def theirs_and_ours(call):
    """Return what a call gives before and after `install()`."""
    theirs = call()
    assert drop_in.install().active
    ours = call()
    drop_in.uninstall()
    return theirs, ours


def test_verls_own_tests(tmp_path):
    """In a process of their own, where verl is imported after `install()`; they have to have come by our functions."""
    code = f"""
    import sys
    import pytest
    from rollout_corr.frameworks.verl import dropin as verl
    from rollout_corr.frameworks.verl import measures as verl_measures
    from rollout_corr.frameworks.verl import shared as verl_shared
    from rollout_corr.frameworks.verl import metrics as scheme

    calls = []
    for module, name in ((scheme, "metrics"), (verl_measures, "_of_rows")):
        original = getattr(module, name)
        setattr(module, name, lambda *given, original=original, name=name: calls.append(name) or original(*given))
    verl.install()
    assert "verl" not in sys.modules
    code = pytest.main(["-q", "-p", "no:cacheprovider", "--pyargs", *{OWN_TESTS}])
    status = verl.installed()
    assert code == 0 and status.active
    assert "tests.trainer.ppo.test_rollout_corr.compute_is_metrics" in status.replaced
    assert calls.count("metrics") > 30 and "_of_rows" in calls
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "30 passed" in done.stdout, done.stdout + done.stderr


def test_checked_versions():
    assert drop_in.DROP_IN.version() in drop_in.DROP_IN.checked


def test_by_name_and_registry(helper):
    """As verl's trainers have it, by name; and verl's own function that looks its neighbor up in the module."""
    trainer = ModuleType("a_trainer")
    sys.modules["a_trainer"] = trainer
    try:
        exec(
            "from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch as add",
            vars(trainer),
        )
        before = trainer.add
        status = drop_in.install()
        assert "a_trainer.add" in status.replaced and trainer.add is helper.compute_rollout_correction_and_add_to_batch
        assert pickle.loads(pickle.dumps(trainer.add)) is trainer.add
        drop_in.uninstall()
        assert trainer.add is before
    finally:
        del sys.modules["a_trainer"]


@pytest.mark.parametrize(
    "config", list(configurations()), ids=lambda config: "-".join(str(x)[:12] for x in config.values())
)
def test_same_numbers(config, helper):
    for seed, shape in enumerate(SHAPES, start=300):
        given = batch(seed, *shape)
        theirs, ours = theirs_and_ours(lambda given=given: verls(helper, given, **config))
        assert torch.equal(ours[1], theirs[1]) and ours[1].dtype == theirs[1].dtype
        assert (ours[0] is None) == (theirs[0] is None)
        if theirs[0] is not None:
            assert ours[0].dtype == theirs[0].dtype
            torch.testing.assert_close(ours[0], theirs[0], rtol=2e-14, atol=0.0)
        assert set(ours[2]) == set(theirs[2])
        wrong = {
            key: (ours[2][key], theirs[2][key]) for key in ours[2] if not close(key, ours[2][key], theirs[2][key], True)
        }
        assert not wrong


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_same_dtypes(dtype, mask_dtype, helper):
    given = batch(7, *SHAPES[0], dtype=dtype, mask_dtype=mask_dtype)
    config = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    theirs, ours = theirs_and_ours(lambda: verls(helper, given, **config))
    assert [x.dtype for x in ours[:2]] == [x.dtype for x in theirs[:2]]


@pytest.mark.parametrize("option", ["token_k1", "token_k3", "seq_mean_k1", "seq_max_k2"])
def test_same_functions_of_log_ratios(option, helper):
    old, rollout, mask = batch(11, *SHAPES[0])
    threshold = "0.8_1.3" if option.endswith("k1") else 0.03

    def call():
        return (
            helper.compute_rollout_correction_weights(old - rollout, mask, "sequence", "0.5_2.0", True),
            helper.compute_rollout_rejection_mask(old - rollout, mask, option, threshold),
            (mask, helper.compute_offpolicy_metrics(old, rollout, mask)),
            (mask, helper.compute_offpolicy_metrics(old, None, mask)),
            (mask, helper.compute_rollout_corr_metrics_from_logprobs(old, rollout, mask)),
        )

    for (their_tensor, their_metrics), (tensor, metrics) in zip(*theirs_and_ours(call), strict=True):
        torch.testing.assert_close(tensor, their_tensor, rtol=2e-14, atol=0.0)
        assert set(metrics) == set(their_metrics)
        assert not {key for key in metrics if not close(key, metrics[key], their_metrics[key], True)}


def test_same_in_a_batch(helper):
    from verl.protocol import DataProto
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    old, rollout, mask = batch(12, *SHAPES[0])
    config = RolloutCorrectionConfig.decoupled_geo_rs_token_tis()

    def call():
        data = DataProto.from_dict({"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask})
        return helper.compute_rollout_correction_and_add_to_batch(data, config)

    (theirs, their_metrics), (ours, metrics) = theirs_and_ours(call)
    assert type(ours) is type(theirs) and set(ours.batch.keys()) == set(theirs.batch.keys())
    for key in theirs.batch.keys():  # noqa: SIM118  (a TensorDict iterates over its rows)
        torch.testing.assert_close(ours.batch[key], theirs.batch[key], rtol=2e-14, atol=0.0)
    assert metrics.keys() == their_metrics.keys()


def test_same_debug_metrics(helper):
    debug = importlib.import_module("verl.utils.debug.metrics")
    from verl.protocol import DataProto

    for seed, shape in enumerate(SHAPES[2:]):
        old, rollout, mask = batch(seed, *shape)
        tensors = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask, "responses": mask}
        theirs, ours = theirs_and_ours(
            lambda tensors=tensors: debug.calculate_debug_metrics(DataProto.from_dict(tensors))
        )
        assert ours == pytest.approx(theirs, rel=1e-10)


@pytest.mark.parametrize("loss_type", ["reinforce", "ppo_clip"])
def test_bypass_mode(loss_type, helper):
    """verl's loss of bypass mode looks our function up at every call; the gradient is the same."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config.actor import ActorConfig

    new, rollout, mask = batch(13, *SHAPES[0])
    advantages = torch.randn(new.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size=2)
    correction = RolloutCorrectionConfig.bypass_pg_geo_rs_token_tis(rs_threshold="0.9_1.1")
    object.__setattr__(correction, "loss_type", loss_type)
    object.__setattr__(config.policy_loss, "rollout_correction", correction)

    def call():
        leaf = new.clone().requires_grad_()
        loss, metrics = get_policy_loss_fn("bypass_mode")(rollout, leaf, advantages, mask, "token-mean", config)
        loss.backward()
        return loss.detach(), leaf.grad, metrics

    theirs, ours = theirs_and_ours(call)
    assert ours[1].any()
    for mine, their in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-12, atol=1e-15)
    assert ours[2].keys() == theirs[2].keys() and len(ours[2]) > 40


@pytest.mark.parametrize("mode", losses.MEANS)
@pytest.mark.parametrize("name", [target.name for target in losses.TARGETS])
def test_losses(name, mode, helper):
    """Values, gradients and metrics of the replaced losses, by the registry where verl has them in it."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config.actor import ActorConfig

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size=2,
        clip_ratio_low=0.1,
        clip_ratio_high=0.25,
        clip_ratio_c=1.6,
    )
    object.__setattr__(config.policy_loss, "dro_beta", 0.2)
    counts = {"dp_size": 2, "batch_num_tokens": 77, "global_batch_size": 9, "loss_scale_factor": 50}

    def call(given, info, weights):
        object.__setattr__(config, "global_batch_info", info)
        old, new, mask = given
        advantages = torch.randn(new.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        registered = name.removeprefix("compute_policy_loss_")
        if registered == "reinforce":
            function = core_algos.compute_policy_loss_reinforce
        else:
            function = core_algos.get_policy_loss_fn(registered)
        leaf = new.clone().requires_grad_()
        loss, metrics = function(old, leaf, advantages, mask, mode, config, weights)
        loss.backward()
        return loss.detach(), leaf.grad, metrics

    for seed, info in ((20, {}), (21, counts)):
        old, new, mask = batch(seed, *SHAPES[0], mask_dtype=torch.bool)
        # A log-prob is never positive; DPPO needs probabilities.
        given = (old.clamp(max=-0.01), new.clamp(max=-0.01), mask)
        weights = torch.rand(given[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        theirs = call(given, info, weights)
        drop_in.install(losses=True)
        ours = call(given, info, weights)
        drop_in.uninstall()
        for mine, their in zip(ours[:2], theirs[:2], strict=True):
            torch.testing.assert_close(mine, their, rtol=1e-10, atol=1e-12)
        if "dppo" in name:
            # verl counts as cut what it has not dropped, we count all.
            cut = "actor/pg_clipfrac_lower"
            assert ours[2].pop(cut) >= theirs[2].pop(cut) - 1e-6
        assert ours[2] == pytest.approx(theirs[2], abs=1e-6)


ERRORS = [
    {"rollout_is": "geometric"},
    {"rollout_is": "token", "rollout_is_threshold": True},
    {"rollout_is": "token", "rollout_is_threshold": ""},
    {"rollout_is": "token", "rollout_is_threshold": "2.0_0.5"},
    {"rollout_is": "token", "rollout_is_threshold": -1.0},
    {"rollout_is": "token", "rollout_is_threshold": "a_b"},
    {"rollout_rs": "token_k1"},
    {"rollout_rs": "", "rollout_rs_threshold": 2.0},
    {"rollout_rs": "token_k4", "rollout_rs_threshold": 2.0},
    {"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5},
    {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"},
    {"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1.5,1.5,1.5"},
]


@pytest.mark.parametrize("options", ERRORS, ids=lambda options: "-".join(map(str, options.values())))
def test_same_errors(options, helper):
    """A mistake raises an error of the type that verl raises."""

    def call():
        with pytest.raises((TypeError, ValueError)) as caught:
            verls(helper, batch(5, *SHAPES[0]), **options)
        return caught.type

    theirs, ours = theirs_and_ours(call)
    assert ours is theirs


def test_what_verl_gets_wrong(helper):
    """Differences that docs/integrations.md calls mended, with verl beside it."""
    ones = torch.ones(2, 3)
    token = {"rollout_is": "token", "rollout_is_threshold": 2.0}
    padded = (torch.full((2, 3), math.nan), ones, torch.tensor([[1, 0, 0], [1, 0, 0]]))
    padded[0][:, 0] = 1.0
    weights, ours = theirs_and_ours(lambda: verls(helper, padded, **token)[0])
    assert weights[:, 1:].isnan().all() and not ours[:, 1:].any() and ours[:, 0].all()
    for threshold in (math.nan, math.inf, "1_2_3"):
        verls(helper, (ones, ones, ones), rollout_is="token", rollout_is_threshold=threshold)
        drop_in.install()
        with pytest.raises(ValueError, match="rollout_is_threshold"):
            verls(helper, (ones, ones, ones), rollout_is="token", rollout_is_threshold=threshold)
        drop_in.uninstall()


def test_inside_a_ray_actor(tmp_path):
    """The hook of ray.init installs in every worker, before the worker imports verl; without it nothing is replaced."""
    code = """
    import sys
    import ray

    class Worker:
        def imported(self):
            return "verl" in sys.modules

        def status(self):
            from verl.trainer.ppo import rollout_corr_helper as helper
            import torch
            from rollout_corr.frameworks.verl import dropin as verl

            ones = torch.ones(2, 3)
            found = helper.compute_rollout_correction_and_rejection_mask(ones, ones, ones * 0, rollout_is="token")
            return verl.installed()._asdict() | {"metrics": len(found[2])}

    hook = {"worker_process_setup_hook": "rollout_corr.frameworks.verl.install"}
    ray.init(num_cpus=1, include_dashboard=False, runtime_env=hook, log_to_driver=False)
    worker = ray.remote(Worker).remote()
    assert not ray.get(worker.imported.remote()), "the hook imported verl, before the actor had its GPUs"
    status = ray.get(worker.status.remote())
    assert status["active"] and status["metrics"] == 27, status
    ray.shutdown()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
