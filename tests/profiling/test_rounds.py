"""Disturbed passes are measured again, doubtful profiles say so, and equal devices are measured as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.profiling.machine import Clock, Kernel, Machine, chain_machine
from tests.support.fake_backend import FakeBackend, Hook, fake_platform
from tests.support.log_lines import log_lines
from tvm_pipeline import Platform, Profile, profile_model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ProfileError
from tvm_pipeline.profiling import patience
from tvm_pipeline.profiling.device_bench import Bench
from tvm_pipeline.profiling.disturbance import Window
from tvm_pipeline.profiling.patience import AGAIN, LEAST_STRICT_S, LONGEST_S, LONGEST_STRICT_S, Patience
from tvm_pipeline.profiling.rounds import ROUNDS, Rounds
from tvm_pipeline.profiling.timings import Timing
from tvm_pipeline.profiling.twins import equal_devices

MS = 1e-3
PASSES = (2, 8, 8, 8)  # of the rounds
REPEATS = sum(PASSES)
TWINS = Platform("twins", (Device("d0", "fake", (0,)), Device("d1", "fake", (1,))))


@pytest.fixture(autouse=True)
def _usual_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "AGAIN", AGAIN)  # which other tests do without


def measured(machine: Machine, platform: Platform, **options: Any) -> Profile:
    return profile_model(FakeBackend(platform.devices, [machine]), machine, platform, REPEATS, **options)


def always() -> bool:
    return True


def disturb(
    machine: Machine,
    device: str,
    extra_s: float,
    when: Callable[[], bool] = always,
    kernel: Kernel | None = None,
) -> None:
    """Let another program take a core for so long in each pass while `when` says so; a kernel may tell of it."""
    usual: Hook = machine.hooks["op0", device]

    def hook(call: int) -> None:
        usual(call)
        if when():
            machine.clock.advance(extra_s)
            if kernel:
                kernel.wait(extra_s)

    machine.hooks = {**machine.hooks, ("op0", device): hook}


def seconds(profile: Profile, device: str) -> list[float]:
    return [figure or 0.0 for figure in profile.devices[device].seconds.values()]


def test_what_was_disturbed_is_measured_again(clock: Clock, kernel: Kernel) -> None:
    """In three of the four rounds everything takes four times as long."""
    machine, said = chain_machine(clock, {"d0": (1 * MS, 2 * MS)}), log_lines("INFO")
    disturb(machine, "d0", 9 * MS, lambda: said[-1].endswith(("round 1 of 4", "round 2 of 4", "round 3 of 4")), kernel)
    profile = measured(machine, fake_platform("d0"))
    assert seconds(profile, "d0") == pytest.approx([1 * MS, 2 * MS])
    assert max(profile.devices["d0"].uncertainty.values()) == pytest.approx(0.0, abs=1e-9)
    assert profile.warnings == ()
    assert profile.environment["disturbed passes"] == f"d0 {REPEATS - 8} of {REPEATS + REPEATS - 8}"
    assert said[ROUNDS:-1] == ["operators on d0 again, because another program disturbed them"] * 3
    assert profile.environment["observed"].startswith("run queue, ")


def test_nothing_is_measured_again_where_nothing_is_disturbed(clock: Clock, kernel: Kernel) -> None:
    machine = chain_machine(clock, {"d0": (1 * MS,), "d1": (3 * MS,)})
    profile = measured(machine, fake_platform("d0", "d1"))
    assert profile.environment["measured for"].endswith(" 0.0 s of them again")
    assert profile.environment["disturbed passes"] == f"d0 0 of {REPEATS}; d1 0 of {REPEATS}"
    timed = [passes + 1 for passes in PASSES]  # a first one of each round does not count
    assert machine.repeats == {"d0": timed, "d1": timed}


@pytest.mark.parametrize(
    ("pass_s", "strict", "passes"), [(0.05, False, 26), (0.24, False, 11), (1, False, 8), (1, True, 26)]
)
def test_passes_that_take_long_are_fewer_unless_strict(
    clock: Clock, kernel: Kernel, pass_s: float, strict: bool, passes: int
) -> None:
    machine = chain_machine(clock, {"d0": (pass_s,)})
    profile = measured(machine, fake_platform("d0"), strict=strict)
    assert profile.environment["disturbed passes"] == f"d0 0 of {passes}"


def test_a_machine_that_is_never_quiet_gives_a_doubtful_profile(clock: Clock, kernel: Kernel) -> None:
    """The time that others took is known, so that the figures are still good."""
    machine = chain_machine(clock, {"d0": (1 * MS, 2 * MS)})
    disturb(machine, "d0", 3 * MS, kernel=kernel)
    profile = measured(machine, fake_platform("d0"))
    assert sum(seconds(profile, "d0")) == pytest.approx(3 * MS)
    assert min(profile.devices["d0"].uncertainty.values()) == pytest.approx(0.5)
    [warning] = profile.warnings
    assert warning.startswith("device d0 was disturbed: 0 of ")
    assert "other programs had its cores for 50% of the time" in warning
    assert "the figures may be off by 50%" in warning


def test_a_strict_profile_is_refused_with_how_long_it_was_tried(clock: Clock, kernel: Kernel) -> None:
    machine = chain_machine(clock, {"d0": (1 * MS, 2 * MS)})
    disturb(machine, "d0", 1.0, kernel=kernel)
    with pytest.raises(ProfileError, match=r"device d0 was disturbed: 0 of \d+ passes .* after 1\d\d\.\d s of trying"):
        measured(machine, fake_platform("d0"), strict=True)


def test_a_strict_profile_of_a_quiet_machine_is_a_profile(clock: Clock, kernel: Kernel) -> None:
    machine = chain_machine(clock, {"d0": (1 * MS, 2 * MS)})
    assert measured(machine, fake_platform("d0"), strict=True).warnings == ()


def test_a_busy_factor_is_that_of_undisturbed_passes(clock: Clock, kernel: Kernel) -> None:
    machine = chain_machine(clock, {"d0": (MS,), "d1": (MS,)}, together={"d0": 1.5, "d1": 1.5})
    said = log_lines("INFO")
    disturb(machine, "d0", 5 * MS, lambda: "together, round" in said[-1] and "round 4" not in said[-1], kernel)
    profile = measured(machine, fake_platform("d0", "d1"))
    assert profile.devices["d0"].busy_factor == pytest.approx(1.5)


def test_a_device_that_is_always_disturbed_has_the_figures_of_its_equal(clock: Clock, kernel: Kernel) -> None:
    machine = chain_machine(clock, {"d0": (1 * MS, 2 * MS), "d1": (1 * MS, 2 * MS)})
    disturb(machine, "d1", 5 * MS, kernel=kernel)
    profile = measured(machine, TWINS)
    assert seconds(profile, "d1") == seconds(profile, "d0") == pytest.approx([1 * MS, 2 * MS])
    assert max(profile.devices["d1"].uncertainty.values()) == pytest.approx(0.0, abs=1e-9)
    [warning] = profile.warnings
    assert warning.startswith("device d1 was disturbed (other programs had its cores for 62% of the time): of ")
    assert warning.endswith(" passes 0 count. It has the figures of its equal d0")


def test_a_difference_between_equal_devices_is_believed_when_it_repeats(clock: Clock, kernel: Kernel) -> None:
    machine = chain_machine(clock, {"d0": (1 * MS, 2 * MS), "d1": (1.3 * MS, 2.6 * MS)})
    profile = measured(machine, TWINS)
    assert seconds(profile, "d0") == pytest.approx([1 * MS, 2 * MS])
    assert seconds(profile, "d1") == pytest.approx([1.3 * MS, 2.6 * MS])
    assert profile.warnings == ("device d1 is 30% slower than its equal d0, in both of two measurements",)


def test_a_difference_that_does_not_repeat_is_not_believed(clock: Clock, kernel: Kernel) -> None:
    """The kernel tells nothing of what slowed the device down."""
    machine, said = chain_machine(clock, {"d0": (1 * MS, 2 * MS), "d1": (1 * MS, 2 * MS)}), log_lines("INFO")
    disturb(machine, "d1", 1 * MS, lambda: said[-1] != "d0 and d1 again, because they are equal and differ")
    profile = measured(machine, TWINS)
    assert seconds(profile, "d0") == seconds(profile, "d1")
    assert sum(seconds(profile, "d0")) == pytest.approx(3 * MS)
    assert "device d1 seemed 33% slower than its equal d0, which did not repeat; they have the same figures" in (
        profile.warnings
    )


def test_devices_of_another_kind_are_not_compared(clock: Clock, kernel: Kernel) -> None:
    kernel.name_processors("small", "large")
    machine = chain_machine(clock, {"d0": (1 * MS, 2 * MS), "d1": (1.3 * MS, 2.6 * MS)})
    profile = measured(machine, TWINS)
    assert seconds(profile, "d1") == pytest.approx([1.3 * MS, 2.6 * MS])
    assert profile.warnings == ()


def test_which_devices_are_equal(clock: Clock, kernel: Kernel) -> None:
    kernel.name_processors("small", "small", "large", "small")
    d0, d1, large, other = (Device(f"d{core}", "fake", (core,)) for core in range(4))
    both, mixed = Device("both", "fake", (0, 1)), Device("mixed", "fake", (1, 2))
    gpus = [Device("gpu0", "fake"), Device("gpu1", "fake")]
    foreign, tuned = replace(d0, name="foreign", backend="tpu"), replace(d0, name="tuned", target="avx")
    groups = equal_devices([d0, d1, large, other, both, mixed, *gpus, foreign, tuned])
    assert [[device.name for device in group] for group in groups] == [
        *(["d0", "d1", "d3"], ["d2"], ["both"], ["mixed"], ["gpu0"], ["gpu1"], ["foreign"], ["tuned"]),
    ]


def test_a_core_that_never_is_as_fast_as_its_equal_counts_as_another_kind(clock: Clock, kernel: Kernel) -> None:
    """Else nothing on it would ever be undisturbed."""
    machine = chain_machine(clock, {"d0": (MS,), "d1": (MS,)})
    benches = {device: Bench(machine, device) for device in TWINS.devices}
    rounds = Rounds(benches, REPEATS, lambda: None, strict=False)
    d0, d1 = TWINS.devices

    def see(device: Device, *references_s: float) -> None:
        benches[device].measured.whole += [Timing(MS, Window(MS, reference_s=each)) for each in references_s]

    see(d0, 1.0, 1.5)
    see(d1, 1.3, 1.6)
    assert (rounds.best_alone_s(d0), rounds.best_alone_s(d1)) == (1.0, 1.3)
    see(d1, 1.02)
    assert (rounds.best_alone_s(d0), rounds.best_alone_s(d1)) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("once_s", "strict", "longest_s"),
    [
        (1e-3, False, AGAIN * 1e-3),
        (2.0, False, AGAIN * 2.0),
        (100.0, False, LONGEST_S),
        (1e-3, True, LEAST_STRICT_S),
        (100.0, True, LONGEST_STRICT_S),
    ],
)
def test_patience_is_in_proportion(once_s: float, strict: bool, longest_s: float) -> None:
    usual = Patience(once_s, strict)
    steps = range(1000, 0, -1)
    lasted = [spent for lacking in steps if usual.lasts(spent := once_s + (1000 - lacking) / 900 * longest_s, lacking)]
    assert max(lasted) - once_s == pytest.approx(longest_s, rel=0.01)


def test_patience_ends_when_nothing_is_gained() -> None:
    usual, strict = Patience(1.0), Patience(1.0, strict=True)
    assert usual.lasts(1.0, 10)
    assert usual.lasts(1.4, 10)
    assert usual.lasts(1.4, 9)
    assert usual.lasts(1.8, 9)
    assert not usual.lasts(1.9, 9)
    assert strict.lasts(1.0, 10)
    assert strict.lasts(15.0, 10)
    assert not strict.lasts(15.0, 0)
