"""Only the room cost/ looks at the model of a device and at the figures of a profile."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from tests.guards.sources import CORE, files, is_here, name, tree

# Attributes that no other class has.
FIGURES = {
    *("macs_per_s", "operator_s", "input_bytes_per_s", "output_bytes_per_s", "refill_bytes_per_s"),
    *("joules", "segments", "mean_spread", "median_spread"),
}
# Attributes that other classes have, too, such as `platform.devices` and `costs.call_s`.
SHARED = {
    "model",
    "devices",
    "seconds",
    "spread",
    "call_s",
    "cached_bytes",
    "spill_s_per_byte",
    "spill_s",
    "busy_factor",
    "lock_s",
    "uncertainty",
}

# Files that define the figures, and that make them.
OWNERS = (
    "cost/*",
    "core/device_model.py",
    "core/platform.py",
    "core/profile.py",
    "profiling/*",
    "calibration/*",
    "plugins/tvm_pipeline_video/host_profile.py",
    "backends/tvm_pipeline_edgetpu/edgetpu.py",
)
# What other files read under the same names, as `receiver.attribute`. Each line has its reason.
ALLOWED: tuple[tuple[str, str, str], ...] = (
    # Another meaning of the word.
    ("planning/sat/*", "staging.model", "the model of CP-SAT"),
    ("planning/sat/*", "placement.model", "the model of CP-SAT"),
    ("planning/sat/*", "self.model", "the model of CP-SAT"),
    ("planning/together/*", "self.model", "the model of CP-SAT"),
    ("planning/together/*", "model.model", "the model of CP-SAT"),
    ("planning/together/*", "loads.model", "the model of CP-SAT"),
    ("planning/together/*", "load.model", "the model of CP-SAT"),
    ("backends/sliced.py", "part.model", "the network of a slice"),
    ("backends/tvm_pipeline_litert/*", "part.model", "the network of a slice"),
    ("backends/contract.py", "self.model", "the network of a slice"),
    ("runtime/pipeline.py", "work.model", "the model's operators of a stage"),
    ("backends/tvm_pipeline_tvm/relay/child.py", "order.model", "the network that a process is to compile"),
    ("plugins/*/device_child.py", "order.model", "the network that a process is to tune"),
    ("testing/conformance.py", "part.model", "the network of a slice"),
    ("planning/sat/least_seconds.py", "self.joules", "joules that cost/ gave"),
    ("planning/measured.py", "segments.seconds", "stages that the search has just measured, not those of a profile"),
    ("planning/planner.py", "decision.segments", "stages that were measured on the way to the decision"),
    ("workflow/steps.py", "decision.segments", "stages that were measured on the way to the decision"),
    *(
        ("plugins/tvm_pipeline_hosts/fleet/*", f"{receiver}.model", "the name of a model in a fleet")
        for receiver in ("duty", "line", "place", "running", "service", "one", "held", "own", "self", "table")
    ),
    ("plugins/tvm_pipeline_hosts/fleet/exact_placement.py", "model.model", "the model of CP-SAT"),
    # The profile is made, completed or summed up, and nothing is decided by a figure.
    ("backends/bundle.py", "profile.devices", "figures of stand-ins are left out once the device is here"),
    ("planning/planner.py", "profile.segments", "only whether there are any: bounds of operators are none of stages"),
    ("planning/certificate.py", "profile.segments", "only whether there are any: certificates are of operators"),
    ("workflow/steps.py", "profile.segments", "what was measured is added"),
    ("workflow/predicted.py", "profile.devices", "devices that it lacks are added, with predicted figures"),
    ("workflow/modelled.py", "profile.devices", "only which devices were measured"),
    ("workflow/predicted.py", "device.model", "only whether there is one beside layer times"),
    ("report/tables.py", "profile.devices", "a summary of what was measured"),
    ("report/tables.py", "device.busy_factor", "a summary of what was measured"),
    ("report/tables.py", "device.median_spread", "a summary of what was measured"),
    ("report/tables.py", "device.seconds", "a summary of what was measured: the number of operators"),
)
# Objects whose attributes of these names are no figures of a device's model or of a profile.
HARMLESS = {
    "devices": lambda receiver: receiver != "profile",
    "model": lambda receiver: receiver in ("", "calibration"),
    "seconds": lambda receiver: not _is_figure_owner(receiver),
    "spread": lambda receiver: not _is_figure_owner(receiver),
    "busy_factor": lambda receiver: receiver in ("cost", "costs"),
    "lock_s": lambda receiver: not _is_figure_owner(receiver),
    "uncertainty": lambda receiver: not _is_figure_owner(receiver),
}
HARMLESS |= dict.fromkeys(
    ("call_s", "cached_bytes", "spill_s_per_byte", "spill_s"), lambda receiver: receiver in ("cost", "costs")
)


def _is_figure_owner(receiver: str) -> bool:
    return receiver in ("profile", "devices", "device", "measured", "segment", "segments", "model", "device_profile")


def receiver_of(value: ast.expr) -> str:
    """Return the last name of an expression: `device` for `problem.platform.device("a")`, `loads` for `loads[0]`."""
    while isinstance(value, (ast.Subscript, ast.Call)):
        value = value.value if isinstance(value, ast.Subscript) else value.func
    if isinstance(value, ast.Attribute):
        return value.attr
    return value.id if isinstance(value, ast.Name) else ""


def read_figures(parsed: ast.AST) -> Iterator[str]:
    """Yield `receiver.attribute` wherever a figure is read, also by `getattr`."""
    for node in ast.walk(parsed):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            value, attribute = node.value, node.attr
        elif isinstance(node, ast.Call) and receiver_of(node.func) == "getattr" and len(node.args) > 1:
            value, constant = node.args[0], node.args[1]
            attribute = str(constant.value) if isinstance(constant, ast.Constant) else ""
        else:
            continue
        receiver = receiver_of(value)
        if attribute in FIGURES or (attribute in SHARED and not HARMLESS[attribute](receiver)):
            yield f"{receiver}.{attribute}"


@cache
def figures_of(path: Path) -> tuple[str, ...]:
    return tuple(read_figures(tree(path)))


def is_allowed(file: str, read: str) -> bool:
    return any(fnmatch(file, pattern) and read == allowed for pattern, allowed, _ in ALLOWED)


@pytest.mark.thorough
def test_only_the_room_cost_looks_at_models_and_profiles() -> None:
    """No file but the owners reads a figure, unless the table says why it may."""
    wrong = [
        f"{name(path)} reads {read}; ask cost_of(problem, device)"
        for path in files()
        if not any(fnmatch(name(path), owner) for owner in OWNERS)
        for read in figures_of(path)
        if not is_allowed(name(path), read)
    ]
    assert wrong == []


@pytest.mark.thorough
def test_every_exception_is_needed() -> None:
    """An exception that no file needs any more goes."""
    used = {(name(path), read) for path in files() for read in figures_of(path)}
    unused = [
        (pattern, allowed)
        for pattern, allowed, _ in ALLOWED
        if is_here(pattern) and not any(fnmatch(file, pattern) and read == allowed for file, read in used)
    ]
    assert unused == []


@pytest.mark.parametrize(
    "line",
    [
        "if device.model is None: pass",
        "slowest = min(d.model.macs_per_s for d in devices)",
        "problem.platform.device(name).model",
        "seconds = problem.profile.devices[name]",
        "seconds = profile.device(name).seconds['conv']",
        "whole = [s for s in problem.profile.segments if s.device == name]",
        "factor = measured.busy_factor",
        "joules = found.joules",
        "model.call_s + model.operator_s",
        "model.spill_s(param_bytes)",
        "getattr(device, 'model')",
        "def late():\n    return lambda device: device.model",
    ],
)
def test_the_guard_sees_a_second_source_of_costs(line: str) -> None:
    """Each of these lines in a scheduler would be a second source of costs."""
    found = list(read_figures(ast.parse(line)))
    assert found
    assert not all(is_allowed("planning/search/greedy.py", read) for read in found)


@pytest.mark.parametrize(
    "line",
    ["costs.call_s", "cost_of(problem, device).added_s(operator)", "platform.devices", "link.seconds(n_bytes)"],
)
def test_the_guard_lets_askers_pass(line: str) -> None:
    """A scheduler asks the room cost/ and looks at the platform."""
    assert list(read_figures(ast.parse(line))) == []


def test_the_owners_exist() -> None:
    """No pattern of the owners is left over from a move."""
    assert (CORE / "cost").is_dir()
    names = [name(path) for path in files()]
    assert all(any(fnmatch(file, owner) for file in names) for owner in OWNERS)
