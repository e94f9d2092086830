"""A framework made for a test, with its drop-in, and as much of the frameworks as results are made of."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from builders import fake_frameworks
from frameworks.calls import DataProto
from rollout_corr.frameworks.areal import dropin as areal
from rollout_corr.frameworks.shared import imports


@pytest.fixture
def frameworks_there(monkeypatch):
    """Let `verl.protocol` and AReaL's result be imported."""
    protocol, functional = ModuleType("verl.protocol"), ModuleType(areal.MODULE)
    protocol.DataProto, functional.RejectionSamplingResult = DataProto, SimpleNamespace
    for module in (ModuleType("verl"), protocol, functional):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Give a function that makes a framework called peer and its drop-in; both are gone without a trace afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    found = []

    def make(drop_in=None, **kinds):
        fake = fake_frameworks.write(tmp_path, "peer", **kinds)
        found.append((fake, fake.drop_in(**drop_in or {})))
        return found[-1]

    yield make
    for fake, drop_in in found:
        drop_in.uninstall()
        fake.forget()
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == imports.__name__]
