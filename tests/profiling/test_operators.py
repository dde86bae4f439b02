"""profile_model on a machine whose seconds are known: medians, the scale, slow-down, doubt, and what is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.profiling.machine import Clock, Machine, by_operator, chain_machine
from tests.support.fake_backend import FakeBackend, FakeRunner, fake_platform
from tests.support.log_lines import log_lines
from tests.support.speed import machine_speed
from tvm_pipeline import Plan, Platform, Prediction, Problem, Profile, Stage, evaluate, plan, profile_model
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.platform import Device, Transfer
from tvm_pipeline.errors import InfeasibleError, ProfileError
from tvm_pipeline.profiling.operators import BUSY_SPREAD
from tvm_pipeline.profiling.rounds import ROUNDS

MS = 1e-3


def measured(machine: Machine, platform: Platform, **options: int) -> Profile:
    return profile_model(FakeBackend(platform.devices, [machine]), machine, platform, **options)


def test_seconds_are_those_of_each_operator_on_each_device(clock: Clock) -> None:
    machine = chain_machine(clock, {"d0": (1 * MS, 2 * MS, 3 * MS), "d1": (6 * MS, 5 * MS, 4 * MS)})
    profile = measured(machine, fake_platform("d0", "d1"))
    assert (profile.graph, profile.fingerprint) == ("chain", machine.graph.fingerprint)
    for device, figures in (("d0", (1, 2, 3)), ("d1", (6, 5, 4))):
        seconds = by_operator(machine.graph, profile.devices[device].seconds)
        assert seconds == pytest.approx({f"op{index}": figure * MS for index, figure in enumerate(figures)})
        spread = by_operator(machine.graph, profile.devices[device].spread)
        assert spread == pytest.approx(dict.fromkeys(seconds, 0.0), abs=1e-9)
    assert profile.warnings == ()
    assert profile.environment["fake"] == "1"


def test_operators_are_scaled_to_the_whole_model(clock: Clock) -> None:
    """The sum of the operators misses what lies between them: here 3 ms of 6 + 3."""
    machine = chain_machine(clock, {"d0": (1 * MS, 2 * MS, 3 * MS)}, between_s=3 * MS)
    platform = fake_platform("d0")
    profile = measured(machine, platform)
    seconds = by_operator(machine.graph, profile.devices["d0"].seconds)
    assert seconds == pytest.approx({"op0": 1.5 * MS, "op1": 3 * MS, "op2": 4.5 * MS})
    # So the prediction of the whole model is what the whole model was measured to take.
    whole = Plan("chain", "by hand", "throughput", (Stage(("d0",), tuple(seconds)),), Prediction(1.0, 1.0))
    predicted = evaluate(Problem(machine.graph, platform, profile), whole.stages).predicted
    assert predicted.throughput_fps == pytest.approx(1 / (9 * MS))


TRANSFERS = Transfer(0.2 * MS, 4e6), Transfer(0.1 * MS, 8e6)


def test_a_device_with_memory_of_its_own_receives_and_sends(clock: Clock) -> None:
    """First transfers in a thread are slow and one sample in seven is, which the medians leave out."""
    machine = chain_machine(
        clock, {"d0": (1 * MS, 2 * MS), "d1": (1 * MS, 1 * MS)}, transfers={"d1": TRANSFERS}, between_s=MS
    )
    profile = measured(machine, fake_platform("d0", "d1"))
    host, device = profile.devices["d0"], profile.devices["d1"]
    assert (host.receive, host.send) == (None, None)
    for found, true in zip((device.receive, device.send), TRANSFERS, strict=True):
        assert found is not None
        assert found.latency_s == pytest.approx(true.latency_s, rel=1e-6)
        assert found.bandwidth_bytes_per_s == pytest.approx(true.bandwidth_bytes_per_s)
    assert {name for _, name in machine.transfer_calls} == {"d1"}  # all of them from threads bound to the device


def test_operators_are_scaled_to_the_whole_model_without_its_transfers(clock: Clock) -> None:
    machine = chain_machine(clock, {"d0": (1 * MS, 2 * MS, 3 * MS)}, transfers={"d0": TRANSFERS}, between_s=3 * MS)
    platform = fake_platform("d0")
    profile = measured(machine, platform)
    seconds = by_operator(machine.graph, profile.devices["d0"].seconds)
    assert seconds == pytest.approx({"op0": 1.5 * MS, "op1": 3 * MS, "op2": 4.5 * MS})
    # The prediction of the whole model contains the transfers again: it is what the whole model was measured to take.
    graph = machine.graph
    moved_s = TRANSFERS[0].seconds(graph.inputs[0].bytes) + TRANSFERS[1].seconds(graph.operators[-1].output_bytes)
    [cost] = evaluate(Problem(graph, platform, profile), (Stage(("d0",), tuple(seconds)),)).costs
    assert (cost.compute_s, cost.transfer_s) == pytest.approx((9 * MS, moved_s))


def test_operators_without_a_fast_schedule_are_named_with_their_share(clock: Clock) -> None:
    machine = chain_machine(clock, {"d0": (1 * MS, 3 * MS), "d1": (1 * MS, 3 * MS)}, between_s=MS)
    machine.slow_operators = lambda device: ["op1"] if device.name == "d1" else []
    (line,) = (line for line in measured(machine, fake_platform("d0", "d1")).warnings if "plain loops" in line)
    assert line.startswith("device d1 computes op1 by plain loops")
    assert "75%" in line


@pytest.mark.parametrize("moving", [False, True])
def test_what_a_device_does_not_compute_has_no_seconds(clock: Clock, moving: bool) -> None:
    """d1 leaves op1 out: it runs two stages, each with its own transfers and 3 ms between its operators."""

    def must_not_run(_: int) -> None:
        raise AssertionError("op1 ran on d1")

    seconds = {"d0": (1 * MS, 2 * MS, 3 * MS, 4 * MS), "d1": (1 * MS, 0.0, 3 * MS, 4 * MS)}
    machine = chain_machine(
        clock, seconds, between_s=4 * MS, refused={"d1": ["op1"]}, transfers={"d1": TRANSFERS} if moving else {}
    )
    machine.hooks = {**machine.hooks, ("op1", "d1"): must_not_run}
    platform = fake_platform("d0", "d1")
    profile = measured(machine, platform)
    figures = profile.devices["d1"]
    assert figures.seconds["op1"] is None
    known = {name: s for name, s in figures.seconds.items() if s is not None}
    assert known == pytest.approx({"op0": 2 * MS, "op2": 6 * MS, "op3": 8 * MS})  # 8 ms of operators take 16
    assert (figures.spread["op1"], figures.uncertainty["op1"], figures.runs) == (0.0, 0.0, 3)
    assert None not in profile.devices["d0"].seconds.values()
    assert not machine.open_stages
    # What the judge says of the two stages is what they were measured to take.
    graph = machine.graph
    stages = Stage(("d1",), ("op0",)), Stage(("d0",), ("op1",)), Stage(("d1",), ("op2", "op3"))
    costs = [cost for cost in evaluate(Problem(graph, platform, profile), stages).costs if cost.device == "d1"]
    moved_s = 2 * (TRANSFERS[0].seconds(8) + TRANSFERS[1].seconds(8)) if moving else 0.0
    links_s = sum(link.seconds(8) for link in profile.links)
    assert sum(cost.compute_s for cost in costs) == pytest.approx(16 * MS)
    assert sum(cost.transfer_s for cost in costs) == pytest.approx(moved_s, abs=links_s + 1e-9)


@pytest.mark.thorough
def test_a_plan_leaves_such_operators_to_other_devices(clock: Clock) -> None:
    """d1 is ten times faster in what it computes."""
    seconds = {"d0": (10 * MS,) * 4, "d1": (1 * MS,) * 4}
    machine = chain_machine(clock, seconds, refused={"d1": ["op3"]})
    platform = fake_platform("d0", "d1")
    problem = Problem(machine.graph, platform, measured(machine, platform))
    decision = plan(problem)
    assert [(s.devices, s.operators) for s in decision.plan.stages] == [
        (("d1",), ("op0", "op1", "op2")),
        (("d0",), ("op3",)),
    ]
    for candidate in decision.candidates:
        assert not any("d1" in stage.devices and "op3" in stage.operators for stage in candidate.stages)
    for name in ("single", "two-stage", "chain", "ideals", "cp-sat"):
        for stage in plan(problem, name).plan.stages:
            assert "d1" not in stage.devices or "op3" not in stage.operators
    with pytest.raises(InfeasibleError, match="no two devices"):
        plan(problem, "replicas")
    assert machine_speed(machine, platform, problem.profile, passes=2) == pytest.approx(1, rel=0.2)


def test_a_device_that_computes_nothing_is_refused(clock: Clock) -> None:
    machine = chain_machine(clock, {"d0": (MS, MS)}, refused={"d1": ["op0", "op1"]})
    with pytest.raises(ProfileError, match="device d1 computes no operator of chain; leave it out of the platform"):
        measured(machine, fake_platform("d0", "d1"))
    assert not machine.open_stages


def test_transfers_that_seem_longer_than_the_whole_model_leave_the_operators_time(clock: Clock) -> None:
    machine = chain_machine(clock, {"d0": (1 * MS, 2 * MS)})
    machine.transfers = {"d0": TRANSFERS}
    slow = Transfer(20 * MS), Transfer(20 * MS)
    exact = machine.time_transfers

    def pessimistic(*given: Any) -> Any:
        machine.transfers = {"d0": slow}
        try:
            return exact(*given)
        finally:
            machine.transfers = {"d0": TRANSFERS}

    machine.time_transfers = pessimistic  # type: ignore[method-assign]
    profile = measured(machine, fake_platform("d0"))
    seconds = by_operator(machine.graph, profile.devices["d0"].seconds)
    assert seconds == pytest.approx({"op0": 1 * MS, "op1": 2 * MS})


def test_a_few_slow_passes_change_no_median_and_cast_no_doubt(clock: Clock) -> None:
    """One call in eight takes fifty times as long: a passing load on the machine."""
    machine = chain_machine(clock, {"d0": ((1 * MS,) * 7 + (50 * MS,), 2 * MS)})
    profile = measured(machine, fake_platform("d0"))
    seconds = by_operator(machine.graph, profile.devices["d0"].seconds)
    assert seconds == pytest.approx({"op0": 1 * MS, "op1": 2 * MS})
    assert profile.warnings == ()


def test_the_busy_factor_is_what_devices_slow_one_another_down(clock: Clock) -> None:
    machine = chain_machine(
        clock, {"d0": (1 * MS, 1 * MS), "d1": (4 * MS, 4 * MS)}, together={"d0": 1.5, "d1": 1.25}, between_s=MS
    )
    profile = measured(machine, fake_platform("d0", "d1"))
    factors = {name: device.busy_factor for name, device in profile.devices.items()}
    assert factors == pytest.approx({"d0": 1.5, "d1": 1.25})
    # Seconds are those of a device that works alone.
    assert sum(by_operator(machine.graph, profile.devices["d0"].seconds).values()) == pytest.approx(3 * MS)


def test_the_busy_factor_is_never_below_one(clock: Clock) -> None:
    machine = chain_machine(clock, {"d0": (MS,), "d1": (MS,)}, together={"d0": 0.8})
    profile = measured(machine, fake_platform("d0", "d1"))
    assert {device.busy_factor for device in profile.devices.values()} == {1.0}


def test_devices_that_share_cores_are_never_measured_together(clock: Clock) -> None:
    halves = (Device("d0", "fake", (0,)), Device("d1", "fake", (1,)))
    platform = Platform("halves and the whole", (*halves, Device("both", "fake", (0, 1))))
    figures = dict.fromkeys(("d0", "d1", "both"), (MS, MS))
    machine = chain_machine(clock, figures, together=dict.fromkeys(figures, 2.0))
    profile = measured(machine, platform)
    factors = {name: device.busy_factor for name, device in profile.devices.items()}
    assert factors == pytest.approx({"d0": 2.0, "d1": 2.0, "both": 1.0})
    assert {(link.source, link.destination) for link in profile.links} == {("d0", "d1"), ("d1", "d0")}


def alternating(middle_s: float, spread: float) -> tuple[float, float]:
    """Return seconds in turn whose interquartile range over their median is `spread`."""
    return middle_s * (1 - spread / 2), middle_s * (1 + spread / 2)


@pytest.mark.parametrize(("factor", "doubtful"), [(0.9, False), (1.1, True)])
def test_a_spread_beyond_the_threshold_is_a_warning(clock: Clock, factor: float, doubtful: bool) -> None:
    spread = factor * BUSY_SPREAD
    machine = chain_machine(clock, {"d0": (MS, MS), "d1": (alternating(MS, spread),) * 2})
    profile = measured(machine, fake_platform("d0", "d1"))
    told = by_operator(machine.graph, profile.devices["d1"].spread)
    assert told == pytest.approx(dict.fromkeys(told, spread))
    assert len(profile.warnings) == doubtful
    for warning in profile.warnings:
        assert warning.startswith(
            f"device d1 was busy with something else while chain was measured (spread {spread:.0%}); "
        )
        assert warning.endswith("stop other programs and profile again")


def test_the_spread_of_several_cores_is_not_blamed_on_other_programs_alone(clock: Clock) -> None:
    machine = chain_machine(clock, {"both": (alternating(MS, 2 * BUSY_SPREAD),) * 2})
    (warning,) = measured(machine, Platform("both cores", (Device("both", "fake", (0, 1)),))).warnings
    assert ", or the host of this virtual machine moved its cores apart, while chain was measured" in warning


def test_the_spread_of_an_operator_counts_by_its_seconds(clock: Clock) -> None:
    """A tiny operator may vary as it likes; a large one may not."""
    tiny, large = alternating(0.01 * MS, 1.0), alternating(10 * MS, 2 * BUSY_SPREAD)
    calm = measured(chain_machine(clock, {"d0": (tiny, 10 * MS)}), fake_platform("d0"))
    assert by_operator(chain_machine(clock, {"d0": (MS, MS)}).graph, calm.devices["d0"].spread)["op0"] > 0.9
    assert calm.warnings == ()
    restless = measured(chain_machine(clock, {"d0": (0.01 * MS, large)}), fake_platform("d0"))
    assert len(restless.warnings) == 1


def test_a_device_with_a_model_is_left_to_it_unless_a_stand_in_computes(clock: Clock) -> None:
    modelled = Device("tpu0", "fake", model=DeviceModel(operator_s=MS))
    stand_in = replace(modelled, name="tpu1", stand_in="TFLite's CPU kernels (no Edge TPU)")
    platform = Platform("mixed", (Device("cpu", "fake"), modelled, stand_in))
    machine = chain_machine(clock, {"cpu": (MS, MS), "tpu1": (2 * MS, 2 * MS)})
    profile = measured(machine, platform)
    assert set(profile.devices) == {"cpu", "tpu1"}
    assert profile.warnings == ("device tpu1 was not here, measured were TFLite's CPU kernels",)


@pytest.mark.parametrize(("repeats", "each_round"), [(24, 8), (8, 2), (1, 2)])
def test_devices_take_turns_in_rounds(clock: Clock, repeats: int, each_round: int) -> None:
    """A load that passes meets all devices and both phases; a round has two passes at least, and the first one two."""
    machine = chain_machine(clock, {"d0": (MS,), "d1": (MS,)})
    platform, said = fake_platform("d0", "d1"), log_lines("INFO")
    profile_model(FakeBackend(platform.devices, [machine]), machine, platform, repeats)
    timed = [2 + 1, *[each_round + 1] * (ROUNDS - 1)]  # a first one of each round does not count
    assert machine.repeats == {"d0": timed, "d1": timed}
    phases = ("operators on d0", "operators on d1", "d0 and d1 together")
    expected = [f"{phase}, round {round_} of {ROUNDS}" for round_ in range(1, ROUNDS + 1) for phase in phases]
    assert said == [*expected, "links"]


def test_a_device_that_cannot_be_bound_is_no_measurement() -> None:
    machine = chain_machine(Clock(), {"d0": (MS,)}, bind_errors={"d0": OSError("no such core")})
    with pytest.raises(OSError, match="no such core"):
        measured(machine, fake_platform("d0"))


@pytest.mark.timeout(20)
def test_a_device_that_fails_beside_others_ends_the_measurement(clock: Clock) -> None:
    machine = chain_machine(clock, {"d0": (MS,), "d1": (MS,)})
    plain = machine.stage

    def failing(operators: Sequence[str], device: Device) -> FakeRunner:
        runner = plain(operators, device)
        run = runner.run

        def run_alone(*buffers: Any) -> None:
            if device.name == "d1" and len([thread for thread in machine.bound if thread.is_alive()]) > 1:
                raise OSError("the device went away")
            run(*buffers)

        runner.run = run_alone  # type: ignore[method-assign]
        return runner

    machine.stage = failing  # type: ignore[method-assign]
    with pytest.raises(OSError, match="went away"):
        measured(machine, fake_platform("d0", "d1"))
