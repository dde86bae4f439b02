"""What a profile says of its own circumstances: how long it took, what was disturbed, and what is doubtful."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.core.platform import Device, core_ranges
from tvm_pipeline.core.profile import DeviceProfile
from tvm_pipeline.profiling.disturbance import MOST_SLOWER, MOST_WAITED, observable
from tvm_pipeline.profiling.estimates import Estimate
from tvm_pipeline.profiling.rounds import Rounds
from tvm_pipeline.profiling.timings import Timing, TrustedTimings, undisturbed

MOST_NAMED = 4  # operators in a line


def observations(rounds: Rounds) -> dict[str, str]:
    """Return how long the measuring took, what could be observed, and what was, for the environment of a profile."""
    cores = sorted({core for group in rounds.groups for device in group for core in device.cores})
    discarded, references = [], []
    for device in (device for group in rounds.groups for device in group):
        measured = rounds.of([device])
        timings, best_s = measured.whole, rounds.best_alone_s(device)
        median_s = np.median([timing.window.reference_s for timing in timings])
        discarded.append(f"{device.name} {len(timings) - len(undisturbed(timings, best_s))} of {len(timings)}")
        if best_s:
            references.append(f"{device.name} {best_s * 1e3:.3f}, {median_s * 1e3:.3f}")
    if not discarded:  # every device was left to its model
        return {}
    return {
        "measured for": f"{rounds.spent_s:.1f} s, {rounds.again_s:.1f} s of them again",
        "observed": ", ".join(observable(cores)),
        "disturbed passes": "; ".join(discarded),
        "reference kernel, best and median ms": "; ".join(references),
    }


def borrowed(group: Sequence[Device], found: Estimate, rounds: Rounds) -> list[str]:
    """Return a warning for each device that has the figures of its equals because too few passes of its own count."""
    warnings = []
    for device in group:
        own = TrustedTimings(rounds.of([device]).whole, rounds.best_alone_s(device), rounds.least)
        if own.is_doubtful and not found.whole.is_doubtful:
            warnings.append(
                f"device {device.name} was disturbed ({losses(own.timings, own.best_s)}): of {len(own.timings)} passes "
                f"{own.undisturbed} count. It has the figures of its equal "
                f"{' and '.join(other.name for other in group if other != device)}"
            )
    return warnings


def without_schedule(compiled: CompiledModel, devices: Mapping[Device, DeviceProfile]) -> list[str]:
    """Return a line for each device on which operators run that no fast schedule serves, with their share of time."""
    lines = []
    for device, figures in devices.items():
        slow = [name for name in compiled.slow_operators(device) if figures.seconds.get(name)]
        share = sum(figures.seconds[name] or 0.0 for name in slow) / figures.whole_s if slow else 0.0
        if slow:
            more = f" and {len(slow) - MOST_NAMED} more" if len(slow) > MOST_NAMED else ""
            lines.append(
                f"device {device.name} computes {', '.join(slow[:MOST_NAMED])}{more} by plain loops, since no fast "
                f"schedule serves them: {share:.0%} of the time of {compiled.graph.name}"
            )
    return lines


def doubt(graph: str, group: Sequence[Device], found: Estimate, rounds: Rounds) -> tuple[float, str]:
    """Return how far off figures of equal devices may be that are doubtful, and a sentence that says why.

    The sentence is empty where nothing is doubtful.
    """
    names = " and ".join(device.name for device in group)
    cores = sorted({core for device in group for core in device.cores})
    named = f"core{'s' if len(cores) > 1 else ''} {', '.join(core_ranges(cores))}"
    kept_off = f", keep it off {named} with `taskset`," if cores else ""
    for phase, passes in (("", found.whole), (" beside other devices", found.busy)):
        if passes.is_doubtful and passes.timings:
            return passes.uncertainty, (
                f"device {names} was disturbed: {passes.undisturbed} of {len(passes.timings)} passes over {graph}"
                f"{phase} count after {rounds.spent_s:.1f} s of trying ({losses(passes.timings, passes.best_s)}), and "
                f"the figures may be off by {passes.uncertainty:.0%}. Stop the other program{kept_off} or profile "
                "again later"
            )
    return 0.0, ""


def losses(timings: Iterable[Timing], best_s: float) -> str:
    """Return what was observed to disturb these timings, in words."""
    windows = [timing.window for timing in timings]
    elapsed_s = sum(window.elapsed_s for window in windows) or 1.0
    waited = sum(window.waited_s or 0.0 for window in windows) / elapsed_s
    stolen = sum(window.stolen_s for window in windows) / elapsed_s
    slower = float(np.median([window.slower(best_s) for window in windows]))
    switches = sum(window.switches for window in windows if window.waited_s is None)
    seen = [
        *([f"other programs had its cores for {waited:.0%} of the time"] if waited > MOST_WAITED else []),
        *([f"the hypervisor took {stolen:.0%}"] if stolen > MOST_WAITED else []),
        *([f"its cores were {slower:.0%} slower than at their best"] if slower > MOST_SLOWER else []),
        *([f"it was switched {switches} times"] if switches else []),
    ]
    return ", ".join(seen) or "briefly, again and again"
