"""Settings that hold for every test, and where the kernels run: interpreted on the CPU, or compiled under `-m gpu`."""

from __future__ import annotations

import contextlib
import os
import re
import warnings

import pytest
from hypothesis import settings

# No deadline: the machines that run this are shared. Derandomized: a red run is red again for whoever looks into it.
settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")


@pytest.fixture(scope="module")
def one_thread():
    """For thousands of tiny operations: waking other threads takes longer than any of them."""
    from frozen import runners

    with runners.one_thread():
        yield


def on_gpu(config):
    """Tell whether the tests that need a GPU were asked for."""
    return re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")) is not None


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="run only the first case of each test (make quick)")
    parser.addoption("--without-gpu", action="store_true", help="with -m gpu: on the CPU, compiled kernels interpreted")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Deselect what means nothing without a GPU, and with --quick all cases of a test but the first that is left."""
    if config.getoption("without_gpu"):
        from lab.ptx.without_gpu import LEFT_OUT

        without_meaning = [item for item in items if any(name in item.nodeid for name in LEFT_OUT)]
        config.hook.pytest_deselected(items=without_meaning)
        items[:] = [item for item in items if item not in without_meaning]
    if not config.getoption("quick"):
        return
    first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
    left_out = [item for item in items if first[item.nodeid.partition("[")[0]] is not item]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if first[item.nodeid.partition("[")[0]] is item]


def pytest_configure(config):
    # Triton decides when a kernel is defined whether it will be interpreted, so before anything can import one.
    os.environ["TRITON_INTERPRET"] = "0" if on_gpu(config) else "1"
    # An error in an interpreted kernel keeps its traceback, with the line of the kernel.
    os.environ.setdefault("TRITON_FRONT_END_DEBUGGING", "1")
    if "PYTEST_XDIST_WORKER" in os.environ:
        # One process a core: more threads would only wait for each other. Read when torch is first imported.
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def quick_interpreter(request):
    """The interpreter of kernels without its repeated work; nothing where kernels are compiled."""
    from builders import interpreter

    with contextlib.nullcontext() if on_gpu(request.config) else interpreter.quick():
        yield


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, quick_interpreter):
    """The device of the tensors of a kernel test. Each run takes one of the two: `make test`, `make test-gpu`."""
    from rollout_corr.backends import operators

    assert operators.interprets() == (request.param == "cpu"), "tests on a GPU run apart from the others: make test-gpu"
    return request.param


@pytest.fixture(scope="session")
def without_gpu(request):
    """The stand-in for a GPU under --without-gpu; None where there is one."""
    if not request.config.getoption("without_gpu"):
        yield None
        return
    from lab.ptx.without_gpu import standing_in

    with standing_in() as gpu:
        yield gpu


@pytest.fixture(autouse=True)
def launches_of_a_test(without_gpu):
    """Begin a fresh session of the stand-in for each test."""
    if without_gpu is not None:
        without_gpu.begin()


@pytest.fixture(scope="session", autouse=True)
def launched(request, without_gpu):
    """A run on a GPU fails if no kernel was launched there: a suite that tested something else would be green too."""
    if not on_gpu(request.config):
        yield
        return
    from builders.launches import counted_launches, first_calls

    first_calls()
    with counted_launches() as count:
        yield
    assert count["cuda"], "no kernel was launched on a GPU"


@pytest.fixture
def nothing_said_yet(monkeypatch):
    """Reset the notices that are printed once a process, so that each test sees them."""
    from rollout_corr.frameworks.shared import settings

    monkeypatch.setattr(settings, "_warned", set())


@pytest.fixture
def quiet():
    """Old names may be used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.fixture
def strict():
    """Nothing may be said."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
