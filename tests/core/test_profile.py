"""Profiles: figures that cannot be, files that are damaged, and profiles of something else."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given

from tests.support.graphs import LEXICOGRAPHIC, Traits, random_chain, random_platform, random_profile, randoms
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.platform import Device, Link, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile, read_profile, unmeasured
from tvm_pipeline.errors import InfeasibleError, OptionError, PipelineError, ProfileError

GRAPH = random_chain(random.Random(0), 3)
PROFILE = {
    "graph": "chain",
    "fingerprint": GRAPH.fingerprint,
    "devices": {
        "a": {
            "seconds": {"op0": 0.1, "op1": None, "op2": 0.3},
            "spread": {"op0": 0.0, "op1": 0.1, "op2": 0.2},
            "busy_factor": 1.5,
            "joules": {"op0": 1, "op1": 2, "op2": 3},
            "receive": {"latency_s": 0.001, "bandwidth_bytes_per_s": 1e6},
        },
        "b": {"seconds": {"op0": 1, "op1": 2, "op2": 3}},
    },
    "links": [{"source": "a", "destination": "b", "latency_s": 0.001, "bandwidth_bytes_per_s": 1e6}],
}


@given(randoms())
def test_files_round_trip(tmp_path_factory: pytest.TempPathFactory, rng: random.Random) -> None:
    graph = random_chain(rng, rng.randint(1, 5))
    profile = random_profile(rng, graph, random_platform(rng, graph, rng.randint(1, 3), Traits()), Traits())
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_bytes(msgspec.json.encode(profile))
    assert read_profile(path) == profile
    read_profile(path).check_graph(graph)


def changed(change: Callable[[Any], None]) -> str:
    content = json.loads(json.dumps(PROFILE))
    change(content)
    return json.dumps(content)  # writes NaN and Infinity as such


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["devices"]["a"]["seconds"].update(op0=math.nan), "invalid character"),
        (lambda p: p["devices"]["a"]["seconds"].update(op0=math.inf), "invalid character"),
        (lambda p: p["devices"]["a"]["seconds"].update(op0=-1), "device a: the figure of operator op0 is -1"),
        (lambda p: p["devices"]["a"]["spread"].update(op0=-1), "device a: the figure of operator op0 is -1"),
        (lambda p: p["devices"]["a"]["joules"].update(op2=-1), "device a: the figure of operator op2 is -1"),
        (lambda p: p["devices"]["a"].update(busy_factor=0), "device a: busy_factor is 0"),
        (lambda p: p["devices"]["a"].update(busy_factor=-1), "device a: busy_factor is -1"),
        (lambda p: p["devices"]["b"]["seconds"].pop("op2"), "its devices list different operators"),
        (lambda p: p["devices"]["a"]["joules"].pop("op0"), "device a: seconds and joules list different operators"),
        (
            lambda p: p["devices"]["a"].update(spread={"op0": 0.1}),
            "device a: seconds and spread list different operators",
        ),
        (lambda p: p["devices"]["a"]["receive"].update(latency_s=-1), "device a: receive has latency_s -1"),
        (lambda p: p["links"][0].update(latency_s=-1), "link a -> b: latency_s -1"),
        (lambda p: p["links"][0].update(bandwidth_bytes_per_s=0), "link a -> b: .*bandwidth_bytes_per_s 0"),
        (lambda p: p["devices"]["a"].update(seconds="fast"), "Expected `object`, got `str`"),
        (lambda p: p.pop("fingerprint"), "missing required field `fingerprint`"),
    ],
)
def test_an_impossible_figure_is_refused_with_file_and_device(
    tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(changed(change))
    with pytest.raises(ProfileError, match=message) as raised:
        read_profile(path)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize("figure", [math.nan, math.inf, -0.1])
def test_a_measurement_that_cannot_be_is_refused_before_it_is_saved(figure: float) -> None:
    """A NaN would be written as null, which means `cannot run it`."""
    with pytest.raises(ProfileError, match="device a: the figure of operator op1 is"):
        Profile("chain", "0", {"a": DeviceProfile.in_order(GRAPH, (0.1, figure, 0.1))})


@pytest.mark.parametrize("content", [b"", b"{", json.dumps(PROFILE).encode()[:-20], b"\xff\xfe"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"profile\.json: "):
        read_profile(path)


def test_a_missing_file_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"cannot read .*: No such file") as raised:
        read_profile(tmp_path / "absent.json")
    assert str(raised.value).count("absent.json") == 1


def good(tmp_path: Path) -> Profile:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    return read_profile(path)


def test_a_problem_wants_the_profile_of_its_graph_and_devices(tmp_path: Path) -> None:
    profile = good(tmp_path)
    platform = Platform("box", (Device("a"), Device("b")))
    assert Problem(GRAPH, platform, profile).link("a", "b").latency_s == 0.001

    other = random_chain(random.Random(1), 3)
    with pytest.raises(ProfileError, match=rf"on chain \({GRAPH.fingerprint}\), not on chain \({other.fingerprint}"):
        Problem(other, platform, profile)
    with pytest.raises(
        ProfileError, match=r"has no device gpu \(it has a, b\); measure it with `tvm-pipeline profile`"
    ):
        Problem(GRAPH, Platform("box", (Device("gpu"),)), profile)
    short = replace(profile, devices={"a": DeviceProfile({"op0": 0.1, "op1": 0.2})})
    with pytest.raises(ProfileError, match="lists 2 operators on device a, the graph has 3; op2 stands in only one"):
        Problem(GRAPH, Platform("box", (Device("a"),)), short)


def test_the_platform_s_links_go_before_the_measured_ones(tmp_path: Path) -> None:
    platform = Platform("box", (Device("a"), Device("b")), (Link("a", "b", 5.0),))
    assert Problem(GRAPH, platform, good(tmp_path)).link("a", "b") == Link("a", "b", 5.0)


def test_what_is_not_measured_needs_a_model_or_an_objective_of_bytes() -> None:
    nothing = unmeasured(GRAPH)
    real, modelled = Device("real"), Device("modelled", model=DeviceModel(call_s=0.001))
    with pytest.raises(
        ProfileError, match=r"nothing says how fast device real of platform box runs chain: give a `profile`, "
    ):
        Problem(GRAPH, Platform("box", (modelled, real)), nothing)
    Problem(GRAPH, Platform("box", (modelled,)), nothing)
    for objective in LEXICOGRAPHIC:
        Problem(GRAPH, Platform("box", (real,)), nothing, objective)
    other = random_chain(random.Random(1), 3)
    with pytest.raises(ProfileError, match="this profile was measured on chain"):
        Problem(other, Platform("box", (modelled,)), nothing)


def test_a_time_limit_may_be_zero(tmp_path: Path) -> None:
    assert Problem(GRAPH, Platform("box", (Device("a"),)), good(tmp_path), time_limit_s=0).time_limit_s == 0


@pytest.mark.parametrize(
    ("figures", "error", "message"),
    [
        ({"stages": 0}, OptionError, "`stages` 0: a plan has at least one stage"),
        ({"stages": -2}, OptionError, "`stages` -2: a plan has at least one stage"),
        ({"stages": 4}, InfeasibleError, "4 stages: chain has only 3 operators, and every stage needs one"),
        (
            {"objective": "speed"},
            OptionError,
            "there is no `objective` 'speed'; there are throughput; latency; energy; memory,communication",
        ),
        ({"min_throughput_fps": 0, "objective": "energy"}, OptionError, "`min_throughput_fps` 0: it must be positive"),
        ({"min_throughput_fps": math.nan, "objective": "energy"}, OptionError, "`min_throughput_fps` nan: it must be"),
        ({"max_latency_s": -1.0}, OptionError, "`max_latency_s` -1: it must be positive"),
        ({"max_latency_s": 0.0}, OptionError, "`max_latency_s` 0: it must be positive"),
        ({"time_limit_s": -1.0}, OptionError, "`time_limit_s` -1: it must not be negative"),
        ({"time_limit_s": math.nan}, OptionError, "`time_limit_s` nan: it must not be negative"),
        (
            {"min_throughput_fps": 9},
            OptionError,
            "`min_throughput_fps` goes with objective latency or energy, not with throughput",
        ),
        (
            {"max_latency_s": 9, "objective": "memory,communication"},
            OptionError,
            "`max_latency_s` goes with objective throughput, not with memory,communication",
        ),
    ],
)
def test_an_impossible_wish_is_refused(
    tmp_path: Path, figures: dict[str, Any], error: type[PipelineError], message: str
) -> None:
    with pytest.raises(error, match=message):
        Problem(GRAPH, Platform("box", (Device("a"),)), good(tmp_path), **figures)
