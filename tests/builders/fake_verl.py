"""As much of verl as the drop-in uses of it, for tests that run without verl."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace


class DataProto(SimpleNamespace):
    """Tensors by name."""

    @classmethod
    def from_dict(cls, tensors):
        return cls(batch=dict(tensors))

    def union(self, other):
        return type(self)(batch={**self.batch, **other.batch})


def put(monkeypatch):
    """Make `verl.protocol` importable."""
    module = ModuleType("verl.protocol")
    module.DataProto = DataProto
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    monkeypatch.setitem(sys.modules, "verl.protocol", module)
