"""rollout_corr/eject/kernel.py: its kernels, in Triton's interpreter, against its own reference and the package."""

from __future__ import annotations

import ast
import importlib.util
import math
import sys
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import torch

import rollout_corr as rc
from builders.files_to_copy import batch
from builders.kernel_cases import INTERPRETED, shuffled
from builders.kernel_file import ALL, LENGTHS, Given, asked_of_the_package, batch_of, differing
from rollout_corr.definition.offsets import OffsetsError
from rollout_corr.eject import eject, kernel
from rollout_corr.eject.kernel import Settings

pytestmark = [*INTERPRETED, pytest.mark.usefixtures("quick_interpreter")]

SHORT = (7, 1, 0, 140, 3)


def check(given: Given, settings: Settings) -> kernel.Correction:
    """Ask kernels, reference and package the same; they must answer alike, and leave the batch as it was."""
    before = [None if x is None else x.clone() for x in given]
    with shuffled(1):
        found = kernel.correct(*given, settings)
    reference, wanted = kernel.correct_reference(*given, settings), asked_of_the_package(given, settings)
    assert differing(reference, wanted) == []
    assert differing(found, wanted) == []
    for x, was in zip(given, before, strict=True):
        assert x is was is None or torch.equal(x, was) or x.isnan().any()
    return found


def random_settings(random: Random) -> Settings:
    """Bounds that the batches cross, each of them open or not."""
    lower, upper, geometric_lower, geometric_upper, veto_lower, veto_upper = (
        random.choice((None, bound)) for bound in (0.8, 1.3, 0.95, 1.05, 0.5, 2.0)
    )
    outside, clamp = random.choice(("clamp", "zero")), random.choice((20.0, 2.0, 0.1))
    return Settings(lower, upper, outside, clamp, geometric_lower, geometric_upper, veto_lower, veto_upper)


@pytest.mark.parametrize("seed", range(0, 120, 10))
def test_random_batches(seed):
    """In any layout, with masks and log-probs of any dtype but float64."""
    for number in range(seed, seed + 10):
        given = batch(number)
        settings = random_settings(given.random)
        if torch.float64 not in (given.train.dtype, given.rollout.dtype):
            with suppress(OffsetsError):  # [0] with one token looks like lengths
                check(Given(given.train, given.rollout, given.mask, given.cu_seqlens), settings)


EDGES = [(LENGTHS, 5), ((512,), 0), ((511, 1, 1), 0), ((2300, 1), 0), ((1, 3) * 300, 0)]


@pytest.mark.parametrize(("lengths", "outside"), EDGES)
def test_tiles(lengths, outside):
    """Around the 128 tokens of a step and the 512 of a tile; more sequences than one round of the search sees."""
    check(batch_of(lengths, outside=outside), ALL)


def strided(x, by):
    """The same rows, in the middle of wider ones, so that none starts at 16 bytes."""
    wide = torch.empty(x.shape[0], x.shape[1] + by, dtype=x.dtype)
    wide[:, 3 : 3 - by] = x
    return wide[:, 3 : 3 - by]


def test_rows_that_lie_apart():
    train, rollout, mask, _ = batch_of((150, 3, 0, 31, 150), packed=False, mask=torch.int64)
    check(Given(strided(train, 5), strided(rollout, 7), strided(mask, 4), None), ALL)


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0), (2, 1)])
def test_rows_of_nothing(shape):
    check(Given(torch.zeros(shape), torch.zeros(shape), torch.ones(shape, dtype=torch.bool), None), ALL)


def test_a_sequence_alone_has_the_bits_of_one_in_a_batch():
    given = batch_of()
    found = kernel.correct(*given, ALL)
    edges = given.cu_seqlens.tolist()
    for s in (4, 7, 9):
        own = slice(edges[s], edges[s + 1])
        alone = kernel.correct(*(x[own] for x in given[:3]), torch.tensor([0, edges[s + 1] - edges[s]]), ALL)
        assert alone.weights.equal(found.weights[own]) and alone.mask.equal(found.mask[own])
        assert alone.keep.item() == found.keep[s]


def around(bound: float, many: int) -> Given:
    """Sequences of a token each, whose D are so many neighbors in fp32, the log of a bound in their middle."""
    middle = torch.tensor(math.log(bound)).view(torch.int32)
    d = (middle + torch.arange(many, dtype=torch.int32) - many // 2).view(torch.float32)
    return Given(d, torch.zeros(many), None, torch.arange(many + 1))


@pytest.mark.parametrize(("bound", "many"), [(0.8, 4), (1.001, 64), (1.3, 4)])
def test_bounds_are_inclusive_and_compare_logs(bound, many):
    """To the last bit of D, which exp does not tell apart, and of the units in which means are summed."""
    for settings in (
        Settings(bound, None, outside="zero"),
        Settings(None, bound, outside="zero"),
        Settings(veto_lower=bound),
        Settings(veto_upper=bound),
        Settings(geometric_lower=bound),
        Settings(geometric_upper=bound),
    ):
        found = check(around(bound, many), settings)
        assert 0 < (found.keep & (found.weights > 0)).sum() < many


@pytest.mark.parametrize("offsets", [[0, 90, 40, 120, 41, 160], [160, 50, 20, 0], [-5, 10, -160, 80, 167, 480]])
def test_wrong_offsets_still_give_an_answer(offsets):
    """A wrong one; compiled code is watched for accesses out of bounds in tests/lab/ptx."""
    given = batch_of((160,), outside=0)
    found = kernel.correct(*given[:3], torch.tensor(offsets), ALL)
    assert set(found.keep.view(torch.uint8).tolist()) <= {0, 1}


def test_inputs_may_require_grad_and_offsets_lie_apart():
    given = batch_of(SHORT)
    cu = given.cu_seqlens.repeat_interleave(2)[::2]
    found = check(Given(given.train.requires_grad_(), given.rollout, given.mask, cu), ALL)
    assert not found.weights.requires_grad


def test_refuses():
    x = torch.zeros(2, 3)
    cu = torch.tensor([0, 3])
    for given, message in (
        ((x, x[:1]), "rollout_logp: expected the shape of train_logp, (2, 3), got (1, 3)"),
        ((x, x, x[0]), "mask: expected the shape of train_logp, (2, 3), got (3,)"),
        ((x, x.double()), "rollout_logp: expected float32, bfloat16 or float16, got torch.float64"),
        ((x[0], x[0]), "train_logp: expected [B, T], or [N] or [1, N] with cu_seqlens, got (3,)"),
        ((x, x, None, cu), "train_logp: expected [B, T], or [N] or [1, N] with cu_seqlens, got (2, 3)"),
        ((x[0], x[0], None, cu.float()), "cu_seqlens: expected [S + 1] int32 or int64, got (2,) torch.float32"),
        ((x[0], x[0], None, cu[:0]), "cu_seqlens: expected [S + 1] int32 or int64, got (0,) torch.int64"),
        ((x, x, x.to("meta")), "mask: expected a tensor on cpu, got one on meta"),
    ):
        for call in (kernel.correct, kernel.correct_reference):
            with pytest.raises(ValueError, match="expected") as error:
                call(*given)
            assert str(error.value) == message


# --- the file ---

FILE = Path(kernel.__file__)


def loaded(text: str, folder: Path):
    """Import a text as a module that is named and placed like a copy of the file."""
    copy = folder / "copied_kernel.py"
    copy.write_text(text)
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    module = importlib.util.module_from_spec(spec)
    sys.modules[copy.stem] = module
    spec.loader.exec_module(module)
    return module


def test_a_copy_needs_torch_and_triton_alone():
    imports = [x for x in ast.walk(ast.parse(FILE.read_text())) if isinstance(x, ast.Import | ast.ImportFrom)]
    names = {x.module if isinstance(x, ast.ImportFrom) else x.names[0].name for x in imports}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"torch", "triton"}


PRINTED = ["openrlhf.tis", "skyrl.token_tis", "slime.mis_geo", "verl.decoupled_token_icepop"]


@pytest.mark.parametrize("name", PRINTED)
@pytest.mark.parametrize("packed", [True, False])
def test_what_eject_prints(name, packed, tmp_path):
    """Without the branches of other settings, with those of a preset."""
    printed, given = loaded(eject(name, kernel=True), tmp_path), batch_of((*SHORT, 600), packed=packed)
    with shuffled(1):
        found = printed.correct(*given)
    wanted = rc.correct(given.train, given.rollout, mask=given.mask, cu_seqlens=given.cu_seqlens, spec=rc.spec(name))
    assert differing(found, wanted) == differing(printed.correct_reference(*given), wanted) == []
    assert len(printed.Settings.__dataclass_fields__) < len(Settings.__dataclass_fields__)


def test_what_other_settings_need_is_left_out():
    text = eject("skyrl.token_tis", kernel=True)
    assert not any(word in text for word in ("GEOMETRIC", "VETO", "OUTSIDE", "LOWER", "def log_of"))
    assert "UPPER: tl.constexpr" in text and "upper: float | None = 2.0" in text and "def metrics" in text
    text = eject("slime.mis_geo", kernel=True)
    assert "geometric_lower: float | None = 0.9999" in text and "veto_lower: float | None = 0.0001" in text
    assert "VETO_UPPER" not in text
