"""`rollout-corr eject NAME --kernel`: kernels without the branches of other settings, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import sys

import pytest

import rollout_corr as rc
from builders.kernel_cases import INTERPRETED, shuffled
from builders.kernel_file import batch_of, differing
from rollout_corr.eject import eject

pytestmark = [*INTERPRETED, pytest.mark.usefixtures("quick_interpreter")]


def copied(name, folder):
    """The module of a file, which Triton reads from the disk."""
    path = folder / f"copied_{name.replace('.', '_')}.py"
    path.write_text(eject(name, kernel=True))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["openrlhf.tis", "skyrl.token_tis", "slime.mis_geo", "verl.decoupled_token_icepop"])
@pytest.mark.parametrize("packed", [True, False])
def test_it_gives_what_the_package_gives(name, packed, tmp_path):
    file, given = copied(name, tmp_path), batch_of((7, 1, 0, 140, 3, 600), packed=packed)
    batch = rc.Batch(mask=given.mask, cu_seqlens=given.cu_seqlens)
    expected = rc.correct(given.train, given.rollout, batch, spec=rc.spec(name), backend="torch")
    with shuffled(1):
        found = file.correct(*given)
    assert differing(found, expected) == []
    assert differing(file.correct_reference(*given), expected) == []


def test_what_other_settings_need_is_left_out():
    text = eject("skyrl.token_tis", kernel=True)
    assert not any(word in text for word in ("GEOMETRIC", "VETO", "OUTSIDE", "LOWER", "def log_of"))
    assert "UPPER: tl.constexpr" in text and "upper: float | None = 2.0" in text and "def metrics" in text
    text = eject("slime.mis_geo", kernel=True)
    assert "geometric_lower: float | None = 0.9999" in text and "veto_lower: float | None = 0.0001" in text
    assert "VETO_UPPER" not in text
