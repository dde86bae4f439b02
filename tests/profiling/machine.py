"""A machine whose clock stands still unless an operator runs: what is measured of it is known exactly."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.fake_backend import FakeModel, FakeRunner, Hook, chain_model
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.platform import Device, Transfer
from tvm_pipeline.profiling import disturbance, twins


class Clock:
    """`time.perf_counter` of each thread on its own: it moves only by `advance`."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def __call__(self) -> float:
        return getattr(self._of_thread, "now", 0.0)

    def advance(self, seconds: float) -> None:
        self._of_thread.now = self() + seconds

    def taking(self, *seconds: float) -> Hook:
        """Return a hook of an operator that takes these seconds in turn, again and again."""
        durations = cycle(seconds)
        return lambda _: self.advance(next(durations))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    """Return a clock on a machine whose kernel tells nothing, so that the load of the real one does not count."""
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    monkeypatch.setattr(disturbance, "PROC", tmp_path / "proc")
    monkeypatch.setattr(twins, "SYSTEM", tmp_path / "sys")
    return made


class Kernel:
    """The files in which a kernel tells what threads and cores lose to others."""

    def __init__(self, folder: Path, cores: int) -> None:
        self._folder, self._waited_s, self._switches = folder, 0.0, 0
        self._stolen_s = dict.fromkeys(range(cores), 0.0)
        (folder / "thread-self").mkdir(parents=True)
        self.wait(0.0)
        self.switch(0)
        self.steal(0, 0.0)

    def wait(self, seconds: float) -> None:
        """Let the threads have waited on a run queue for so much longer."""
        self._waited_s += seconds
        (self._folder / "thread-self/schedstat").write_text(f"5000000 {self._waited_s * 1e9:.0f} 7\n")

    def switch(self, times: int) -> None:
        """Let the threads have been switched involuntarily so many times more."""
        self._switches += times
        text = f"Name:\tpython\nvoluntary_ctxt_switches:\t3\nnonvoluntary_ctxt_switches:\t{self._switches}\n"
        (self._folder / "thread-self/status").write_text(text)

    def steal(self, core: int, seconds: float) -> None:
        """Let the hypervisor have taken so much more of a core."""
        self._stolen_s[core] += seconds
        ticks = {core: round(stolen_s * os.sysconf("SC_CLK_TCK")) for core, stolen_s in self._stolen_s.items()}
        lines = [f"cpu{core} 10 0 10 10 0 0 0 {stolen} 0 0" for core, stolen in ticks.items()]
        (self._folder / "stat").write_text("\n".join(["cpu  40 0 40 40 0 0 0 999 0 0", *lines, "intr 1 2 3"]) + "\n")

    def name_processors(self, *names: str) -> None:
        """Say what kind of core each core is."""
        paragraphs = [f"processor\t: {core}\nmodel name\t: {name}\n" for core, name in enumerate(names)]
        (self._folder / "cpuinfo").write_text("\n".join(paragraphs))


@pytest.fixture
def kernel(clock: Clock) -> Kernel:
    """Return the kernel of the machine of `clock`; it tells that nothing is disturbed."""
    return Kernel(disturbance.PROC, cores=4)


class Machine(FakeModel):
    """A FakeModel on a machine that is slower while several devices work, and a little slower for whole passes.

    Args:
        between_s: seconds that a run takes in addition to its operators.
        together: how many times longer a run takes while another device works too, by device.
        transfers: how a device with memory of its own receives and sends tensors, by device.
    """

    def __init__(
        self,
        clock: Clock,
        graph: OperatorGraph,
        functions: Mapping[str, Callable[..., Any]],
        *,
        between_s: float = 0.0,
        together: Mapping[str, float] | None = None,
        transfers: Mapping[str, tuple[Transfer, Transfer]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(graph, functions, **options)
        self.transfers = transfers or {}
        self.transfer_calls: list[tuple[threading.Thread, str]] = []
        self.clock, self.between_s, self.slow_down = clock, between_s, together or {}
        self.bound: dict[threading.Thread, str] = {}
        self.repeats: dict[str, list[int]] = {}

    def stage(self, operators: Sequence[str], device: Device) -> FakeRunner:
        runner = super().stage(operators, device)
        bind, run = runner.bind, runner.run

        def bind_noted() -> None:
            bind()
            self.bound[threading.current_thread()] = device.name

        def run_slowed(*buffers: Any) -> None:
            begin = self.clock()
            run(*buffers)
            self.clock.advance(self.between_s)
            if device.name in self.transfers:
                receive, send = self.transfers[device.name]
                taken, given = (sum(array.nbytes for array in arrays) for arrays in buffers)
                self.clock.advance(receive.seconds(taken) + send.seconds(given))
            others = {name for thread, name in self.bound.items() if thread.is_alive()} - {device.name}
            if others:
                self.clock.advance((self.clock() - begin) * (self.slow_down.get(device.name, 1.0) - 1))

        runner.bind, runner.run = bind_noted, run_slowed  # type: ignore[method-assign]
        return runner

    def time_operators(self, device: Device, repeats: int) -> npt.NDArray[np.float64]:
        self.repeats.setdefault(device.name, []).append(repeats)
        return super().time_operators(device, repeats)

    def time_transfers(
        self, device: Device, sizes_bytes: Sequence[int], repeats: int
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
        """Return exact figures, but for the first call in each thread and for one sample in seven, which are slow."""
        if device.name not in self.transfers:
            return None
        thread = threading.current_thread()
        is_first = thread not in {caller for caller, _ in self.transfer_calls}
        self.transfer_calls.append((thread, self.bound.get(thread, "")))
        received, sent = (
            np.tile([transfer.seconds(size) for size in sizes_bytes], (repeats, 1))
            for transfer in self.transfers[device.name]
        )
        for seconds in (received, sent):
            seconds[3::7] *= 10
            if is_first:
                seconds *= 100
        return received, sent


def chain_machine(clock: Clock, seconds: Mapping[str, Sequence[float | Sequence[float]]], **options: Any) -> Machine:
    """Return a chain whose operators take these seconds on each device: a number, or several in turn."""
    count = len(next(iter(seconds.values())))
    chain = chain_model(count)
    hooks = {
        (operator.name, device): clock.taking(*durations(figure))
        for device, figures in seconds.items()
        for operator, figure in zip(chain.graph.operators, figures, strict=True)
    }
    return Machine(clock, chain.graph, chain.functions, hooks=hooks, **options)


def durations(figure: float | Sequence[float]) -> Iterable[float]:
    return figure if isinstance(figure, Sequence) else (figure,)


def by_operator(graph: OperatorGraph, figures: Mapping[str, float] | Sequence[float]) -> dict[str, float]:
    """Return the figures of a DeviceProfile by the operator's name."""
    if isinstance(figures, Mapping):
        return dict(figures)
    return dict(zip(graph.operator_names, figures, strict=True))
