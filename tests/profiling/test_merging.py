"""The profile of models that are planned as one graph."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest

from tvm_pipeline import Device, DeviceProfile, Platform, Problem, Profile, Stage, evaluate, merge_graphs
from tvm_pipeline.core.platform import Link, Transfer
from tvm_pipeline.core.profile import IdlePower
from tvm_pipeline.errors import ProfileError
from tvm_pipeline.profiling import merging
from tvm_pipeline.profiling.merging import merge_profiles
from tvm_pipeline.testing import example_graph

LEFT, RIGHT = (replace(example_graph(), name=name) for name in ("left", "right"))
BOTH = merge_graphs([LEFT, RIGHT], "both")


def profile(graph, *rows, **fields) -> Profile:
    """Seconds of `double` and `increment` on d0, then on d1."""
    devices = {f"d{index}": DeviceProfile.in_order(graph, row) for index, row in enumerate(rows)}
    return Profile(graph.name, graph.fingerprint, devices, **fields)


def test_a_stage_of_two_models_takes_the_sum_of_their_seconds() -> None:
    of_both = [profile(LEFT, [0.01, 0.02], [0.03, 0.04]), profile(RIGHT, [0.1, 0.2], [0.3, 0.4])]
    problem = Problem(BOTH, Platform("box", (Device("d0"), Device("d1"))), merge_profiles(BOTH, [LEFT, RIGHT], of_both))
    first = Stage(("d0",), ("source", "left/double", "right/double", "right/increment"))
    second = Stage(("d1",), ("left/increment", "sink"))
    assert [cost.compute_s for cost in evaluate(problem, (first, second)).costs] == pytest.approx([0.31, 0.04])


def test_what_belongs_to_the_machine_is_not_summed() -> None:
    left = profile(LEFT, [0.01, 0.02], lock_s={"double": 0.005}, warnings=("slow",), power_mode="15W")
    right = profile(RIGHT, [0.1, 0.2], idle=IdlePower("rail", "the board", 3.0), warnings=("slow",), power_mode="15W")
    link = Link("d0", "d0", 1e-3)
    busy = replace(right.devices["d0"], busy_factor=1.5, receive=Transfer(0.001), predicted_from="times.json")
    right = replace(right, links=(link,), devices={"d0": busy})
    both = merge_profiles(BOTH, [LEFT, RIGHT], [left, right])
    assert (both.links, both.idle, both.warnings) == ((link,), right.idle, ("slow",))
    assert (both.lock_s, both.power_mode) == ({"left/double": 0.005}, "15W")
    device = both.device("d0")
    assert (device.busy_factor, device.receive, device.predicted_from) == (1.5, Transfer(0.001), "times.json")


def test_what_one_model_lacks_the_merged_graph_lacks() -> None:
    left = profile(LEFT, [0.01, None])
    with_joules = DeviceProfile.in_order(LEFT, [0.01, None], [0.1, 0.1], joules=[1.0, 2.0])
    left = replace(left, devices={"d0": with_joules})
    right = profile(RIGHT, [0.1, 0.2])
    device = merge_profiles(BOTH, [LEFT, RIGHT], [left, right]).device("d0")
    assert (device.joules, device.spread) == (None, {})
    assert device.seconds["left/increment"] is None
    assert device.seconds["source"] == device.seconds["sink"] == 0.0


@pytest.mark.parametrize(
    ("left", "right", "match"),
    [
        (profile(LEFT, [1, 2], [1, 2]), profile(RIGHT, [1, 2]), "device d1 was measured for left and not for right"),
        (profile(LEFT, [1, 2]), profile(RIGHT, [1, 2], [1, 2]), "device d1 was measured for right and not for left"),
        (profile(LEFT, [1, 2], power_mode="15W"), profile(RIGHT, [1, 2]), "left in 15W and right in no power mode"),
        (profile(RIGHT, [1, 2]), profile(LEFT, [1, 2]), "measured on right .* not on left"),
    ],
)
def test_what_does_not_fit_together_is_refused(left, right, match) -> None:
    with pytest.raises(ProfileError, match=match):
        merge_profiles(BOTH, [LEFT, RIGHT], [left, right])


def test_the_documented_example_runs() -> None:
    results = doctest.testmod(merging)
    assert results.attempted
    assert not results.failed
