"""The Triton part of a file: the kernels of the package, specialized, and equal to them to the bit."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
import torch

import rollout_corr as rc
from builders import ejected, interpreter
from rollout_corr.eject import CannotEject, eject, fused


def loaded(made, folder, name):
    """Import a file: Triton reads the source of a kernel from where it stands."""
    path = folder / f"{name}.py"
    path.write_text(made.source)
    described = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


def batch(seed, tokens, sequences):
    random = torch.Generator().manual_seed(seed)
    inner = torch.randint(0, tokens + 1, (sequences - 1,), generator=random).sort().values
    offsets = torch.cat([torch.tensor([0]), inner, torch.tensor([tokens])])
    train = -torch.rand(tokens, generator=random)
    rollout = train + 0.2 * torch.randn(tokens, generator=random)
    mask = torch.rand(tokens, generator=random) > 0.2
    if seed:
        offsets = torch.stack([offsets, -offsets], 1)[:, 0]  # strided
    train[tokens // 3], rollout[tokens // 2], mask[tokens // 2] = float("nan"), -float("inf"), True
    return train, rollout, mask, offsets


# Token weights, and weights and criteria of sequences, which take the third launch and are here without plain torch.
SPECS = {
    "token": rc.Spec(weight=rc.Weight.token(upper=2.0)),
    "sequence": rc.Spec(
        weight=rc.Weight.geometric(upper=1.5),
        criteria=(rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.5, upper=1.05),),
        rejected="both",
    ),
}

BACKENDS = {"token": "both", "sequence": "triton"}
CHOICE = {"token": {"backend": "fused"}, "sequence": {}}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files, each written once."""
    folder = tmp_path_factory.mktemp("ejected")
    made = {name: eject(spec, backend=BACKENDS[name]) for name, spec in SPECS.items()}
    return made, {name: loaded(one, folder, f"fused_{name}") for name, one in made.items()}


@pytest.mark.parametrize("name", SPECS)
def test_equals_the_kernels_bit_by_bit(name, files):
    module = files[1][name]
    with interpreter.quick():
        for seed, (dtype, *sizes) in enumerate([(torch.float32, 150, 5), (torch.bfloat16, 5, 3)]):
            train, rollout, mask, offsets = batch(seed, *sizes)
            train = train.to(dtype)
            weights, kept, keep, metrics = module.correct(train, rollout, mask, offsets, **CHOICE[name])
            of = rc.Batch(mask=mask, cu_seqlens=offsets)
            out = rc.correct(train, rollout, of, spec=SPECS[name], backend="triton")
            torch.testing.assert_close(weights, out.weights, rtol=0, atol=0)
            assert torch.equal(kept, out.mask)
            assert torch.equal(keep, out.keep)
            expected = out.metrics("dashboard")
            assert {key: metrics[key] for key in expected} == expected


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("tokens", "offsets"), [(0, [0, 0, 0]), (0, [0]), (3, [0])])
def test_an_empty_batch(name, tokens, offsets, files):
    logp, offsets = torch.zeros(tokens), torch.tensor(offsets)
    with interpreter.quick():
        weights, mask, keep, metrics = files[1][name].correct(logp, logp, None, offsets, **CHOICE[name])
    assert weights.tolist() == [0.0] * tokens
    assert mask.tolist() == [False] * tokens
    assert keep.tolist() == [True] * (len(offsets) - 1)
    assert metrics["tokens_kept_fraction"] == 0.0


def test_an_unknown_backend(files):
    nothing, offsets = torch.zeros(0), torch.zeros(3, dtype=torch.int64)
    correct = files[1]["token"].correct
    with pytest.raises(ValueError, match="backend: expected 'eager' or 'fused', got 'fast'"):
        correct(nothing, nothing, None, offsets, backend="fast")


def test_a_choice_says_once_what_runs_and_never_falls_back(files, caplog, monkeypatch):
    module = files[1]["token"]
    train, rollout, mask, offsets = batch(0, 20, 3)
    monkeypatch.setattr(module, "_logged", set())
    with caplog.at_level("INFO"):
        first = module.correct(train, rollout, mask, offsets)
        module.correct(train, rollout, mask, offsets)
    assert [record.message for record in caplog.records] == ["rollout correction runs on the eager backend"]
    assert torch.equal(first[2], rc.correct(train, rollout, rc.Batch(mask=mask, cu_seqlens=offsets),
                                            spec=SPECS["token"], backend="torch").keep)  # fmt: skip
    # As where kernels are compiled.
    monkeypatch.setattr(module.triton.runtime, "JITFunction", type(module.read_kernel))
    with pytest.raises(RuntimeError, match="backend='fused': expected tensors on a GPU, got some on the CPU"):
        module.correct(train, rollout, mask, offsets, backend="fused")


def test_kernels_alone_import_no_more_and_say_where_they_run(files, monkeypatch):
    made, module = files[0]["sequence"], files[1]["sequence"]
    assert not re.search(r"_eager|backend|logg", made.source.partition("sha256")[2])
    monkeypatch.setattr(module.triton.runtime, "JITFunction", type(module.read_kernel))
    with pytest.raises(RuntimeError, match="train_logp: expected tensors on a GPU, got some on the CPU"):
        module.correct(*batch(0, 20, 3))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["verl.decoupled_geo_rs_token_tis", "skyrl.token_tis", "trl.token_truncate"])
def test_a_framework_takes_kernels_alone(what, tmp_path):
    made = eject(what, what.partition(".")[0], backend="triton")
    (tmp_path / "kernels_alone.py").write_text(made.source)
    (tmp_path / "test_kernels_alone.py").write_text(made.test("kernels_alone"))
    (tmp_path / "conftest.py").write_text(STAND_IN)
    ran = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
                         capture_output=True, text=True, check=False,
                         env={**os.environ, "TRITON_INTERPRET": "1"})  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-2000:]


# In place of what a file for verl imports.
STAND_IN = """
import sys, types
verl, protocol = types.ModuleType("verl"), types.ModuleType("verl.protocol")
protocol.DataProto = type("DataProto", (), {"from_dict": lambda tensors: types.SimpleNamespace(batch=tensors)})
sys.modules |= {"verl": verl, "verl.protocol": protocol}
"""


@pytest.mark.slow
def test_every_process_writes_the_same_file(files):
    """As --check needs it, whatever order sets of texts have."""
    made = files[0]["token"]
    code = "from rollout_corr import Spec, Weight; from rollout_corr.eject import eject; "
    code += f"print(eject({made.request.spec!r}, backend='both').source, end='')"
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                         env={**os.environ, "PYTHONHASHSEED": seed})  # fmt: skip
    assert ran.stdout == made.source


def test_nothing_is_left_that_the_plan_decides(files):
    for made in files[0].values():
        assert ("import math" in made.source) == ("math." in made.source)
        assert max(map(len, made.source.splitlines())) <= 120
        kernels = made.source.partition("def read_kernel")[2].partition("def _fused")[0]
        assert not re.search(r"\b(PLAN|TILING|SHAPE|static_range|found\[|kept\[)", kernels)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("roll.segment", "expected no turns for the Triton part: a walk along turns"),
        (rc.Spec(weight=rc.Weight.token(normalize="sequence")), "expected normalize='batch' or None .* got 'sequence'"),
        ("areal.m2po", "the kernels do not run it"),
    ],
)
def test_refused(what, message):
    with pytest.raises(CannotEject, match=message):
        eject(what, backend="both")


COMPILE = """
import importlib.util, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
described = importlib.util.spec_from_file_location("file", sys.argv[1])
file = importlib.util.module_from_spec(described)
described.loader.exec_module(file)
kinds = {"train_logp": "*bf16", "rollout_logp": "*fp32", "weights": "*fp32", "mask": "*u8", "mask_out": "*u8",
         "keep_out": "*u8", "offsets": "*i64", "counts": "*i32", "integers": "*i64", "floats": "*fp32",
         "counter": "*i32", "tokens": "i64", "sequences": "i64", "slots": "i64"}
kinds |= {"new_logp": "*bf16", "base_logp": "*bf16", "trains": "*u8", "scaled": "*bf16", "advantages": "*fp32",
          "inners": "*fp32", "gradient": "*fp32", "value": "*fp32", "upstream": "*fp32"}
for kernel in [x for name, x in vars(file).items() if name.endswith("_kernel")]:
    default = lambda name: "*fp64" if name.endswith(("sums", "maxima", "statistics", "divisor")) else "i32"
    signature = {name: kinds.get(name) or default(name) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={})
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    print(kernel.__name__, ".local" in found.asm["ptx"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", [SPECS["token"], "slime.tis"], ids=["token", "loss"])
def test_compiles_for_a_gpu_that_is_not_here(what, tmp_path):
    # In a process of its own: here kernels are interpreted.
    loss = isinstance(what, str)
    path = tmp_path / "file.py"
    path.write_text(eject(what, backend="triton", loss=loss).source)
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE, path], capture_output=True, text=True, env=environment, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    kernels = ["read", "decide", *(["gradient", "sequences", "scale"] if loss else [])]
    assert ran.stdout.splitlines() == [f"{name}_kernel False" for name in kernels]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slime.mis", "verl.staleness", "open_instruct.vaco"])
def test_mean_of_the_batch_ages_and_advantages(name):
    with interpreter.quick():
        assert ejected.differences(eject(name, backend="triton")) == []


@pytest.mark.slow
def test_a_scheme_that_no_metric_reads_has_no_part(tmp_path):
    made = eject("xtuner.reasoning", backend="both")
    module = loaded(made, tmp_path, "fused_xtuner")
    train, rollout, mask, offsets = batch(0, 150, 5)
    with interpreter.quick():
        metrics = module.correct(train, rollout, mask, offsets, backend="fused")[3]
        of = rc.Batch(mask=mask, cu_seqlens=offsets)
        expected = rc.correct(train, rollout, of, spec=rc.spec("xtuner.reasoning"), backend="triton").metrics(
            "dashboard"
        )
    assert {key: metrics[key] for key in expected} == expected


@pytest.mark.slow
def test_a_statistic_that_nothing_stores_is_refused(monkeypatch):
    # Kernels store these only where a column of slots is there, which is taken away here.
    monkeypatch.setattr(fused, "NEVER", fused.NEVER | {"d_beyond"})
    with pytest.raises(CannotEject, match=r"would not store .*verl/log_difference"):
        eject("verl.disabled", "verl", backend="both")
