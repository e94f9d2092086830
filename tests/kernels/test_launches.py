"""Launches by kept kernels are Triton's own: the kernels that its dispatch takes, its stream, its hooks, its driver."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from builders.launched import Driver, dispatched
from lab.aot.loss_variants import LOSS_VARIANTS
from lab.aot.variants import VARIANTS
from rollout_corr.kernels import launches
from rollout_corr.kernels.grid import warp_size

SMALL = {name: VARIANTS[name] for name in list(VARIANTS)[::10]}
CPU = torch.device("cpu")


def taken_by_triton(launch):
    """The compiled kernel that Triton's dispatch takes for a launch, which runs once more."""
    warps = max(1, launch.threads // warp_size(launch.device))
    return launch.kernel[(launch.programs,)](**launch.arguments, num_warps=warps, enable_fp_fusion=True)


def moved(x, by):
    """A tensor like another so many elements behind a multiple of 16 bytes."""
    return torch.zeros(x.numel() + 16, dtype=x.dtype)[by:][: x.numel()].view(x.shape)


def random_launches(variant, chance):
    """List the launches of a variant for a batch of random size whose tensors lie anywhere."""
    tokens, sequences = chance.choice(((64, 4), (20_000, 200), (20_000, 1), (3000, 8), (4096, 4)))
    given = variant.given(tokens, sequences, CPU)
    places = chance.choice(((0,), (0,), (0, 0, 0, 1, 3)))
    tensors = {name: x for name, x in vars(given).items() if isinstance(x, torch.Tensor)}
    return variant.launches(replace(given, **{name: moved(x, chance.choice(places)) for name, x in tensors.items()}))


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_the_kernel_that_is_kept_is_the_one_that_triton_takes(backend, monkeypatch):
    """Over batches of random sizes, addresses and dtypes; each is launched twice, the second time past Triton."""
    if backend == "hip":
        # AMD's compiler is told of small storages too: here of those that some of these batches exceed.
        from triton.backends.amd.compiler import HIPBackend

        monkeypatch.setattr(torch.version, "hip", "6.0")
        monkeypatch.setattr(launches, "SMALL_STORAGE", 20_000)
        monkeypatch.setattr(HIPBackend, "is_within_2gb", staticmethod(lambda x: x.untyped_storage().nbytes() <= 20_000))
    chance, past = random.Random(0), 0
    with dispatched(backend) as driver:
        for variant in [*SMALL.values(), *list(LOSS_VARIANTS.values())[::6]]:
            for _ in range(5):
                for launch in random_launches(variant, chance):
                    launch.run()
                    before = len(driver.compiled)
                    for _ in range(2):
                        launch.run()
                    kept, programs, stream, arguments = driver.launched[-1]
                    assert (programs, stream, len(driver.compiled)) == (launch.programs, driver.stream, before)
                    assert kept is taken_by_triton(launch), (variant.name, launch.kernel.__name__)
                    assert addresses(arguments) == addresses(driver.launched[-1][3])
                    past += launch.call.key in launch.site.compiled
    assert past > 80


def addresses(arguments):
    """Arguments as a driver sees them."""
    if isinstance(arguments, (tuple, list)):
        return [addresses(x) for x in arguments]
    return arguments.data_ptr() if isinstance(arguments, torch.Tensor) else arguments


def one_launch():
    """The first launch of a variant, which ran once, and the same again: it goes past Triton."""
    variant = next(iter(SMALL.values()))
    given = variant.given(256, 2, CPU)
    variant.launches(given)[0].run()
    return variant.launches(given)[0]


def test_every_launch_is_on_the_stream_that_is_current_then():
    with dispatched() as driver:
        launch = one_launch()
        for driver.stream in (7, 9, 7):
            launch.run()
            assert driver.launched[-1][2] == driver.stream


def test_another_driver_compiles_for_itself():
    with dispatched() as driver:
        launch = one_launch()
        triton.runtime.driver.set_active(other := type(driver)())
        launch.kernel.device_caches.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton.compiler, "compile", other.compile)
            launch.run()
        assert len(other.compiled) == len(other.launched) == 1


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_called_around_every_launch(name):
    """Those of a profiler, which comes after kernels were compiled and goes again."""
    called = []
    with dispatched():
        launch = one_launch()
        chain = getattr(triton.knobs.runtime, name)
        launch.run()
        assert not called
        chain.add(called.append)
        try:
            launch.run()
            launch.run()
        finally:
            chain.remove(called.append)
        launch.run()
    assert len(called) == 2


def test_hooks_of_a_kernel_are_called_before_its_launches():
    """Added after its first launch, when a kernel is kept; what a hook is given are tensors, as by Triton."""
    called = []
    with dispatched() as driver:
        launch = one_launch()
        launch.run()
        launch.kernel.add_pre_run_hook(lambda *args, **named: called.append(named["p_train_logp"]))
        launch.run()
        launch.run()
        assert [x.data_ptr() for x in called] == 2 * [launch.arguments["p_train_logp"].data_ptr()]
        launch.kernel.pre_run_hooks.clear()
        launch.run()
        assert len(called) == 2 and len(driver.launched) == 5


class Unloading(Driver):
    """A driver that unloads a kernel when its object is gone, as Triton 3.9 does; its launches hold nothing."""

    def load(self, kernel, options):
        loaded, launched = self.loaded, self.launched

        def run(programs, one, other, stream, function, *others):
            assert function in loaded, "the module of this kernel was unloaded"
            launched.append(function)

        super().load(kernel, options)
        kernel._run = run
        loaded.add(kernel.function)
        weakref.finalize(kernel, loaded.discard, kernel.function)
        return kernel

    def __init__(self):
        super().__init__()
        self.loaded = set()


def test_what_is_kept_outlives_the_cache_of_triton():
    with dispatched(driver=Unloading()) as driver:
        launch = one_launch()
        launch.kernel.device_caches.clear()
        gc.collect()
        launch.run()
        assert len(driver.launched) == 2 and len(driver.loaded) == len(driver.compiled) == 1
        launch.site.compiled.clear()
        gc.collect()
        assert not driver.loaded


def another_call(change):
    """A Triton whose dispatch calls launchers in another way."""
    run = JITFunction.run

    def called(kernel, *args, warmup, **others):
        compiled = run(kernel, *args, warmup=True, **others)
        if not warmup:
            launcher, compiled._run = compiled.run, lambda *arguments: change(launcher, *arguments)
            try:
                run(kernel, *args, warmup=False, **others)
            finally:
                compiled._run = launcher
        return compiled

    return JITFunction, "run", called


OTHER_TRITONS = {
    "no chain of hooks": (triton.knobs.runtime, "launch_enter_hook", None),
    "one argument more": another_call(lambda launcher, *given: launcher(*given, "more")),
    "no hooks": another_call(lambda launcher, *given: launcher(*given[:7], None, None, *given[9:])),
    "another stream": another_call(lambda launcher, *given: launcher(*given[:3], 0, *given[4:])),
}


@pytest.mark.parametrize("other", OTHER_TRITONS)
def test_another_triton_launches_by_itself(other, monkeypatch):
    """Where it calls launchers in another way than this one does: every launch once, as its own dispatch makes it."""
    monkeypatch.setattr(*OTHER_TRITONS[other])
    with dispatched() as driver:
        launch = one_launch()
        for launched in (2, 3):
            launch.run()
            assert len(driver.launched) == launched and len(driver.compiled) == 1
        assert not launch.site.compiled
        (_, programs, _, arguments), wanted = driver.launched[-1], addresses(tuple(launch.arguments.values()))
        assert programs == launch.programs and addresses(arguments)[: len(wanted)] == wanted


def test_kernels_for_debugging_are_others(monkeypatch):
    with dispatched() as driver:
        launch = one_launch()
        before = len(driver.compiled)
        monkeypatch.setattr(triton.knobs.runtime, "debug", True)
        launch.run()
        assert len(driver.compiled) == before + 1
        monkeypatch.setattr(triton.knobs.runtime, "debug", False)
        launch.run()
        assert driver.launched[-1][0] is not driver.launched[-2][0]


def test_what_other_threads_launch_is_launched():
    """While one thread only compiles; and launches of many threads are as many."""
    with dispatched() as driver:
        launch = one_launch()
        before = len(driver.launched)
        with launches.compiled_meanwhile(1):
            launch.site.compiled.clear()
            launch.run()
            assert len(driver.launched) == before
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda _: launch.run(), range(40)))
        assert len(driver.launched) == before + 40
        assert {id(kept) for kept, *_ in driver.launched} == {id(driver.launched[0][0])}


class Crossing(Driver):
    """A driver whose first launch ends while the second runs, if that does not wait for the first."""

    def __init__(self):
        super().__init__()
        self.began, self.first_is_over = (threading.Event(), threading.Event()), threading.Event()

    def load(self, kernel, options):
        super().load(kernel, options)
        run, waits = kernel._run, iter((self.began[1], self.first_is_over))

        def crossed(*arguments):
            run(*arguments)
            other = next(waits, None)
            if other is not None:
                self.began[len(self.launched) - 1].set()
                other.wait(0.5)

        kernel._run = crossed
        return kernel


def test_two_threads_that_first_launch_a_kernel_leave_its_launcher():
    """Neither puts back the recorder of the other, which would keep the arguments of every launch from then on."""
    with dispatched(driver=Crossing()) as driver:
        variant = next(iter(SMALL.values()))
        one, other = (variant.launches(variant.given(256, 2, CPU))[0] for _ in range(2))
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(one.run)
            assert driver.began[0].wait(60)
            second = pool.submit(other.run)
            first.result()
            driver.first_is_over.set()
            second.result()
        ((kernel, *_), *_) = driver.launched
        (kept,) = one.site.compiled.values()
        assert kernel.run.__name__ == kept.launcher.__name__ == "crossed"
        one.run()
        assert len(driver.launched) == 3 and len(driver.compiled) == 1


def test_a_forked_child_has_what_its_parent_kept():
    """As Triton's own cache does: a driver that lives through a fork is launched on, and nothing is compiled again."""
    with dispatched() as driver:
        launch = one_launch()
        launch.run()
        before = len(driver.compiled), len(driver.launched)
        child = os.fork()
        if child == 0:
            found = "nothing"
            try:
                launch.run()
                same = driver.launched[-1][0] is driver.launched[-2][0]
                found = same, len(driver.compiled) - before[0], len(driver.launched) - before[1]
            finally:
                os._exit(0 if found == (True, 0, 1) else 1)
        assert os.waitpid(child, 0)[1] == 0
        launch.run()
        assert (len(driver.compiled), len(driver.launched)) == (before[0], before[1] + 1)
