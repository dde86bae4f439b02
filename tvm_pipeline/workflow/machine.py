"""The machine whose devices a model is compiled for and measured on: this one, or a board that is reached from here.

The steps of `steps.py` ask a Machine for all that needs its devices, so that they are the same for both. `HERE` is
this machine. An installed package that reaches others has an entry point of the group `tvm_pipeline.machines`: a
function of an address that returns a context, in which there is a Machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tvm_pipeline.backends.bundle import Bundle, open_bundle
from tvm_pipeline.backends.contract import Backend, CompiledModel, TuningReport
from tvm_pipeline.calibration.stage_profile import with_stage_times
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.errors import OptionError
from tvm_pipeline.planning.measured import SegmentTimer
from tvm_pipeline.plugins import entry_points
from tvm_pipeline.power import power_modes
from tvm_pipeline.profiling import profile_model, stage_timer
from tvm_pipeline.runtime.comparison import Run, runner
from tvm_pipeline.runtime.isolation import DeviceProcesses, isolated
from tvm_pipeline.runtime.metering import metered
from tvm_pipeline.workflow.doubts import elsewhere_warnings, known_devices
from tvm_pipeline.workflow.machine_modes import other_mode, this_machine
from tvm_pipeline.workflow.power_meter import opened_meter, required_sensor, with_joules
from tvm_pipeline.workflow.tune_targets import tune_model

GROUP = "tvm_pipeline.machines"


class Metering(Protocol):
    """Makes runs of a model tell the joules of its frames, too."""

    def __call__(self, compiled: CompiledModel, platform: Platform, run: Run | None = None) -> Run:
        """Return what runs plans of a model on a platform, by `run` where that is given."""


class Machine(Protocol):
    """A machine with devices. A model that one of its methods takes was compiled for devices that `platform` gave.

    Attributes:
        name: for messages; empty for this machine.
        processor: by which what tuning has found there is known; empty for this machine.
    """

    @property
    def name(self) -> str: ...

    @property
    def processor(self) -> str: ...

    def platform(self, given: Platform | None, model: Model | None) -> Platform:
        """Return the platform that is given, or the devices that are found for a model."""

    def compared(self, compiled: CompiledModel, platform: Platform) -> None:
        """Have devices compared where that was not done when a model was compiled; see `CompiledModel.compare`.

        Raises:
            ModelError: a device computes nothing as the others do.
        """

    def opened(self, path: Path) -> AbstractContextManager[Bundle]:
        """Open a bundle that was made for the machine while the block lasts; raise BundleError as `open_bundle`."""

    def check_sensor(self, wanted: str) -> None:
        """Raise what `power_meter.required_sensor` does where there is no sensor of this name."""

    def profile(
        self, backend: Backend, compiled: CompiledModel, platform: Platform, repeats: int, strict: bool
    ) -> Profile:
        """Measure a model, as `profiling.profile_model` does; the profile's environment names the devices."""

    def with_joules(self, compiled: CompiledModel, platform: Platform, profile: Profile, sensor: str) -> Profile:
        """Return a profile with joules, as `power_meter.with_joules` does."""

    def doubts(self, source: Path, profile: Profile, platform: Platform) -> list[str]:
        """Return a line where a profile was measured on another machine, as `doubts.elsewhere_warnings` does."""

    def other_mode(self, platform: Platform, name: str) -> str:
        """Return why the machine does not show the figures of a power mode; empty where it does."""

    def stage_timer(self, compiled: CompiledModel, platform: Platform) -> SegmentTimer:
        """Return the function that times stages of a model, as `profiling.stage_timer` does."""

    def run(self, compiled: CompiledModel, platform: Platform) -> Run:
        """Return the function that runs a plan of a model on noise, as `runtime.comparison.runner` does."""

    def metering(self, problem: Problem, sensor: str) -> AbstractContextManager[Metering]:
        """Have a sensor of this name, as `power_meter.opened_meter` takes it, measure runs while the block lasts."""

    def check(
        self, compiled: CompiledModel, platform: Platform, own: CompiledModel, own_platform: Platform
    ) -> list[str]:
        """Compare a model on each kind of the machine's devices with the same model compiled for this machine.

        Returns:
            A line for each kind of device, which says how far its outputs are off; none where no device computes all.

        Raises:
            ModelError: a device computes something else.
        """

    def tune(self, model: Model, platform: Platform | None, seconds: float) -> list[TuningReport]:
        """Search for faster kernels, as `tune_targets.tune_model` does; later compilations for the machine use them."""


class _ThisMachine:
    """The machine that this process runs on."""

    name = ""
    processor = ""

    def platform(self, given: Platform | None, model: Model | None) -> Platform:
        return given or this_machine(model)

    def compared(self, compiled: CompiledModel, platform: Platform) -> None:
        """Do nothing: `Backend.compile` has compared them."""

    def opened(self, path: Path) -> AbstractContextManager[Bundle]:
        return open_bundle(path)

    def check_sensor(self, wanted: str) -> None:
        required_sensor(wanted).close()

    def profile(
        self, backend: Backend, compiled: CompiledModel, platform: Platform, repeats: int, strict: bool
    ) -> Profile:
        found = profile_model(backend, compiled, platform, repeats, strict)
        found = with_stage_times(compiled, platform.devices, found)
        unsteady = filter(None, [power_modes().unsteady()])
        environment = {**found.environment, **known_devices(platform)}
        return replace(found, environment=environment, warnings=(*found.warnings, *unsteady))

    def with_joules(self, compiled: CompiledModel, platform: Platform, profile: Profile, sensor: str) -> Profile:
        return with_joules(compiled, platform, profile, required_sensor(sensor))

    def doubts(self, source: Path, profile: Profile, platform: Platform) -> list[str]:
        return elsewhere_warnings(source, profile, platform)

    def other_mode(self, platform: Platform, name: str) -> str:
        return other_mode(platform, name)

    def stage_timer(self, compiled: CompiledModel, platform: Platform) -> SegmentTimer:
        return stage_timer(compiled)

    def run(self, compiled: CompiledModel, platform: Platform) -> Run:
        return runner(compiled, platform)

    @contextmanager
    def metering(self, problem: Problem, sensor: str) -> Iterator[Metering]:
        with opened_meter(sensor) as meter, ExitStack() as stack:
            stack.callback((processes := DeviceProcesses()).end)

            def measuring(compiled: CompiledModel, platform: Platform, run: Run | None = None) -> Run:
                if run is None:
                    apart = isolated(compiled, platform, (), processes=processes, every=False)
                    run = runner(stack.enter_context(apart), platform)
                return metered(run, problem, meter)

            yield measuring

    def check(
        self, compiled: CompiledModel, platform: Platform, own: CompiledModel, own_platform: Platform
    ) -> list[str]:
        """Return no line: the model is the same one."""
        return []

    def tune(self, model: Model, platform: Platform | None, seconds: float) -> list[TuningReport]:
        return [report for _, report in tune_model(model, platform, seconds)]


HERE: Machine = _ThisMachine()


@contextmanager
def opened_machine(address: str | None) -> Iterator[Machine]:
    """Give the machine at an address while the block lasts; this machine without an address.

    Raises:
        OptionError: no installed package reaches other machines, or several do.
        PipelineError: what the package raises where it does not reach the machine.
    """
    if address is None:
        yield HERE
        return
    reaching = {entry.value: entry for entry in entry_points(group=GROUP)}
    if not reaching:
        raise OptionError(
            f"`remote` {address}: the part that reaches other machines is missing, the package tvm_pipeline_hosts; "
            "install tvm-pipeline with it, or run the command on that machine",
            option="remote",
        )
    if len(reaching) > 1:
        raise OptionError(f"`remote` {address}: several packages reach machines: {', '.join(sorted(reaching))}")
    [entry] = reaching.values()
    with entry.load()(address) as machine:
        yield machine
