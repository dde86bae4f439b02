"""A board as the machine that a model is compiled for: compiled here, measured and run over there.

    with opened_board("localhost:9190") as machine:
        made = compile_source("model.onnx", machine=machine)
        profile = measured_profile(made, machine=machine)

What the board is to measure travels as a bundle of its own, with a plan that nobody runs; later bundles of the same
model share its files, so that weights travel once. Read next: board_measuring.py, what the board does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from tvm_pipeline import Bundle, Device, Model, OperatorGraph, Plan, Platform, Problem, Profile, Stage
from tvm_pipeline.backends.bundle import read_documents
from tvm_pipeline.backends.contract import Backend, CompiledModel, Order, StageRunner, TuningReport
from tvm_pipeline.backends.registry import find_backend, versions_of
from tvm_pipeline.core.profile import SegmentProfile
from tvm_pipeline.errors import BundleError, PlatformError
from tvm_pipeline.planning.measured import SegmentTimer
from tvm_pipeline.runtime.comparison import Run, Turn
from tvm_pipeline.workflow.machine import Machine, Metering
from tvm_pipeline_hosts.remote.board import Board
from tvm_pipeline_hosts.remote.board_check import check_board, frame_of_noise, outputs_on, whole_devices
from tvm_pipeline_hosts.remote.board_measuring import BoardPlatform, CheckedProfile, TuningRequest, TuningResult
from tvm_pipeline_hosts.remote.board_models import BoardClient, outputs_there, send_model, with_triple

_log = logging.getLogger(__name__)


@contextmanager
def opened_board(address: str) -> Iterator[Machine]:
    """Give the board at an address while the block lasts; raise what `Board.connect` raises."""
    _log.info(f"connecting to {address}")
    with Board.connect(address) as board:
        yield RemoteMachine(board)


class RemoteMachine:
    """A board: a `workflow.machine.Machine`."""

    def __init__(self, board: BoardClient) -> None:
        self.board, self.name = board, board.name
        self._settled = self._settle(None)
        self.processor = self._settled.processor
        self._bundles: dict[int, tuple[CompiledModel, str]] = {}  # by identity of the model, its bundle over there

    def platform(self, given: Platform | None, model: Model | None) -> Platform:
        """Return the platform that is given, or that of the board without devices that are not compiled for here.

        Raises:
            PlatformError: the board does not have the devices, there is none to compile for, or its software has
                another version than this machine's.
        """
        settled = self._settle(given) if given else self._settled
        for line in settled.warnings:
            _log.warning(f"board {self.name}: {line}")
        devices = tuple(with_triple(device, settled.machine) for device in settled.platform.devices)
        found = replace(settled.platform, devices=devices)
        if model is None:
            return found
        if not given:
            found = replace(found, name=self.name)
            found = self._without_strangers(found, model)
        self._check_versions(found, settled.versions)
        return found

    def compared(self, compiled: CompiledModel, platform: Platform) -> None:
        """Have the board compare devices of several targets; what some must not compute is that of `compiled`, too."""
        if len({device.target for device in platform.devices}) < 2:
            return
        asked = {"bundle": self._sent(compiled, platform)}
        found = self.board.call("compare", asked, kind=dict[str, dict[str, str]])[0]
        if not found:
            return
        compiled.refuse(found)
        del self._bundles[id(compiled)]  # the next one has what was found
        reasons = {name: why for refused in found.values() for name, why in refused.items()}
        for device in platform.devices:
            computes = set(compiled.computes(device))
            if left := [o.name for o in compiled.graph.operators if o.name not in computes]:
                _log.warning(
                    f"{device.name} of board {self.name}: {len(left)} of {len(compiled.graph)} operators stay on other "
                    f"devices, such as {', '.join(left[:3])}: {reasons[left[0]]}"
                )

    @contextmanager
    def opened(self, path: Path) -> Iterator[Bundle]:
        """Send a bundle of the board's, and give what it says of its model; the board runs it."""
        found = read_documents(path)
        if found.is_application:
            raise BundleError(
                f"{path} holds a whole application, whose source is the board's: run the command on the board"
            )
        compiled = _ModelElsewhere(found.graph, self.name)
        self._bundles[id(compiled)] = compiled, self.board.send(path)
        yield Bundle(found.graph, found.platform, found.profile, found.plan, compiled)

    def check_sensor(self, wanted: str) -> None:
        self.board.call("check_sensor", {"sensor": wanted})

    def profile(
        self, backend: Backend, compiled: CompiledModel, platform: Platform, repeats: int, strict: bool
    ) -> Profile:
        asked = {"bundle": self._sent(compiled, platform), "repeats": repeats, "strict": strict}
        return self.board.call("profile", asked, kind=Profile)[0]

    def with_joules(self, compiled: CompiledModel, platform: Platform, profile: Profile, sensor: str) -> Profile:
        asked = {"bundle": self._sent(compiled, platform), "profile": profile, "sensor": sensor}
        found, _ = self.board.call("joules", asked, kind=CheckedProfile)
        for line in found.warnings:
            _log.warning(f"board {self.name}: {line}")
        return found.profile

    def doubts(self, source: Path, profile: Profile, platform: Platform) -> list[str]:
        asked = {"source": str(source), "profile": profile, "platform": platform}
        return self.board.call("doubts", asked, kind=list[str])[0]

    def other_mode(self, platform: Platform, name: str) -> str:
        """Return that nobody knows which power mode the board is in, where figures are of one."""
        return f"the figures are of power mode {name}, and the mode of board {self.name} is not known" if name else ""

    def stage_timer(self, compiled: CompiledModel, platform: Platform) -> SegmentTimer:
        def timed(operators: Sequence[str], device: Device) -> SegmentProfile:
            asked = {"bundle": self._sent(compiled, platform), "operators": operators, "device": device.name}
            return self.board.call("stage_time", asked, kind=SegmentProfile)[0]

        return timed

    def run(self, compiled: CompiledModel, platform: Platform) -> Run:
        return self._run(compiled, platform, {})

    @contextmanager
    def metering(self, problem: Problem, sensor: str) -> Iterator[Metering]:
        """Give what runs plans on the board, with the joules of a sensor over there, or of its platform's watts."""

        def measuring(compiled: CompiledModel, platform: Platform, run: Run | None = None) -> Run:
            return run or self._run(compiled, platform, {"sensor": sensor, "profile": problem.profile})

        yield measuring

    def check(
        self, compiled: CompiledModel, platform: Platform, own: CompiledModel, own_platform: Platform
    ) -> list[str]:
        here = whole_devices(own, own_platform)
        lines: list[str] = []
        if not here:
            return lines
        expected = outputs_on(own, here[0], frame_of_noise(own.graph))
        for device in whole_devices(compiled, platform):
            _log.info(f"comparing {device.name} of board {self.name} with this machine")
            found = outputs_there(self.board, self._sent(compiled, platform), compiled.graph, device.name)
            apart = check_board(self.name, compiled.graph, device.name, expected, found)
            lines.append(f"{device.name} of board {self.name} against {here[0].name} of this machine: {apart}")
        return lines

    def tune(self, model: Model, platform: Platform | None, seconds: float) -> list[TuningReport]:
        """Tune a model on the board, with its compiler; models that are compiled here for the board use what is found.

        Raises what `tune_targets.tune_model` raises, and ModelError where the board has no C compiler.
        """
        asked = TuningRequest(replace(model, content=b"", params=b""), seconds, platform)
        files = [np.frombuffer(content, np.uint8) for content in (model.content, model.params)]
        found, _ = self.board.call("tune", msgspec.to_builtins(asked), files, list[TuningResult])
        for each in found:
            settled = self._settle(platform) if platform else self._settled
            device = with_triple(settled.platform.device(each.device), settled.machine)
            backend = find_backend(device.backend)
            backend.take_tuning_records(device, self.processor, each.records)
        return [each.report for each in found]

    def _settle(self, given: Platform | None) -> BoardPlatform:
        return self.board.call("settle", {"platform": given}, kind=BoardPlatform)[0]

    def _without_strangers(self, platform: Platform, model: Model) -> Platform:
        """Return the platform without devices that a model cannot be compiled for on this machine."""
        reasons: dict[str, str] = {}
        for device in platform.devices:
            try:
                backend = find_backend(device.backend)
                if refused := backend.refuses(model):
                    reasons[device.name] = refused
                else:
                    backend.settle_elsewhere(device)
            except PlatformError as error:
                reasons[device.name] = str(error)
        kept = tuple(device for device in platform.devices if device.name not in reasons)
        told = [f"{name} of board {self.name} is left out: {why}" for name, why in reasons.items()]
        if not kept:
            raise PlatformError("; ".join(told) or f"board {self.name} has no devices")
        for line in told:
            _log.warning(line)
        names = {device.name for device in kept}
        links = tuple(link for link in platform.links if {link.source, link.destination} <= names)
        return replace(platform, devices=kept, links=links)

    def _check_versions(self, platform: Platform, there: Mapping[str, str]) -> None:
        for name, version in versions_of(platform).items():
            if name in there and there[name] != version:
                raise PlatformError(
                    f"board {self.name} has {name} {there[name]}, and this machine has {version}: a model that is "
                    "compiled here does not load there. Install the same version on both"
                )

    def _run(self, compiled: CompiledModel, platform: Platform, more: Mapping[str, Any]) -> Run:
        def run(plan: Plan, seconds: float) -> Turn:
            asked = {"bundle": self._sent(compiled, platform), "plan": str(plan), "seconds": seconds, **more}
            return self.board.call("turn", asked, kind=Turn)[0]

        return run

    def _sent(self, compiled: CompiledModel, platform: Platform) -> str:
        """Return the bundle of a model over there; send it at first."""
        known = self._bundles.get(id(compiled))
        if known is None:
            id_there = send_model(self.board, compiled, platform)
            known = self._bundles[id(compiled)] = compiled, id_there
        return known[1]


class _ModelElsewhere(CompiledModel):
    """The model of a bundle that a board has, as far as it is known here: a CompiledModel that computes nothing."""

    order: Order = "listed"

    def __init__(self, graph: OperatorGraph, board: str) -> None:
        self.graph, self._board = graph, board

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        self._refuse()

    def activation_bytes(self, operators: Sequence[str], device: Device) -> tuple[int, int]:
        self._refuse()

    def time_operators(self, device: Device, repeats: int) -> NoReturn:
        self._refuse()

    def time_transfers(self, device: Device, sizes_bytes: Sequence[int], repeats: int) -> NoReturn:
        self._refuse()

    def save(self, folder: Path, stages: Sequence[Stage], platform: Platform) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise PlatformError(f"{self.graph.name} is on board {self._board}, and nothing of it runs here")
