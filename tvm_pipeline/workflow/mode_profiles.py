"""A profile for each power mode of a machine, and a plan over these. Read next: machine_modes.py, steps.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tvm_pipeline.backends.registry import settle_platform
from tvm_pipeline.core.in_mode import in_mode
from tvm_pipeline.core.plan import Decision
from tvm_pipeline.core.platform import Platform, read_platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.errors import OptionError, PowerError
from tvm_pipeline.planning import BEST, SCHEDULERS, check_scheduler, plan_modes
from tvm_pipeline.power import power_modes
from tvm_pipeline.profiling.settling import unsettled
from tvm_pipeline.workflow.machine_modes import check_allowed, this_machine
from tvm_pipeline.workflow.steps import Compiled

_log = logging.getLogger(__name__)


def profile_modes(
    platform: Path | None, compile_in: Callable[[str], Compiled], measure: Callable[[Compiled], Profile], allowed: bool
) -> Iterator[tuple[Compiled, Profile]]:
    """Measure a model once in each power mode of a platform; yield each profile, with what was measured, as it is done.

    It is compiled once, in the mode with most cores. A mode that cannot be set, such as one that takes a reboot, is
    left out with a warning.

    Args:
        platform: the file of the platform; without one, this machine is detected.
        compile_in: compiles the model for that platform as it is in the mode of this name.
        measure: measures what was compiled.
        allowed: modes may be set; each is put back before the next.

    Raises:
        OptionError: the platform has no modes, or they may not be set.
        PowerError: none of them can be set.
    """
    machine = power_modes()
    machine.put_back_left()
    whole = read_platform(platform) if platform else this_machine(None)
    if not whole.power_modes:
        raise OptionError(
            f"`power_modes`: platform {whole.name} has none; give a `platform` with [[power_mode]] tables",
            option="power_modes",
        )
    for mode in whole.power_modes:
        check_allowed(mode, "this profile", allowed)
    made: Compiled | None = None
    refused: list[str] = []
    for mode in sorted(whole.power_modes, key=lambda mode: len(mode.offline_cores)):
        with ExitStack() as stack:
            try:
                stack.enter_context(machine.mode_set(mode))
            except PowerError as error:
                refused.append(str(error))
                _log.warning(f"power mode {mode.name} is left out: {error}")
                continue
            made = made or compile_in(mode.name)
            backend, settled = settle_platform(in_mode(whole, mode.name))
            here = replace(made, backend=backend, platform=settled)
            doubts = tuple(unsettled(here.compiled, settled))
            for line in doubts:
                _log.warning(line)
            found = measure(here)
            measured = replace(found, power_mode=mode.name, warnings=(*found.warnings, *doubts))
        yield here, measured  # with the mode put back
    if made is None:
        raise PowerError(f"no power mode of platform {whole.name} can be set: {'; '.join(refused)}")


def mode_file(output: Path, mode: str) -> Path:
    """Return the file of a mode's profile beside `output`; that itself where the mode is empty.

    >>> mode_file(Path("profiles/net.json"), "5W")
    PosixPath('profiles/net-5W.json')
    """
    return output.with_name(f"{output.stem}-{mode}{output.suffix}") if mode else output


def decide_modes(
    problem: Problem, machine: Platform, profiles: Sequence[Profile], scheduler: str
) -> tuple[Decision, Problem]:
    """Return the best plan over the power modes of these profiles, by prediction, and the problem of its mode.

    Args:
        problem: what is asked for, in any of the modes.
        machine: the platform with all of these modes.

    Raises what `planning.plan_modes` raises, and OptionError for the scheduler that measures stages.
    """
    check_scheduler(scheduler)
    if scheduler != BEST and SCHEDULERS[scheduler].cut:
        raise OptionError(
            f"`scheduler` {scheduler} measures stages, in one power mode alone; give the `profile` of one mode",
            option="scheduler",
        )
    problems = [replace(problem, platform=in_mode(machine, p.power_mode), profile=p) for p in profiles]
    decision = plan_modes(problems, scheduler)
    return decision, next(p for p in problems if p.profile.power_mode == decision.plan.power_mode)
