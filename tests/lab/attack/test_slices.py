"""A slice of every area of attack, found by listing: `make attack` runs the rest."""

from __future__ import annotations

import pytest

from lab.attack import campaign


@pytest.mark.parametrize("name", campaign.names())
def test_slice(name):
    area = campaign.load(name)
    (found,) = campaign.run([(area, range(area.few))])
    wrong = [f'make attack ARGS="{name} --seed {seed}": {detail}' for seed, detail in found.wrong.items()]
    assert not wrong, "\n".join(wrong)
    assert found.tried == area.few
