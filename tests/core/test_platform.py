"""Platforms: TOML files, links, and the sets of devices that can work at the same time."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from tests.support.graphs import Traits, random_chain, random_platform, randoms
from tvm_pipeline.core.device_model import DeviceModel, KindFactor
from tvm_pipeline.core.platform import Device, Link, Platform, disjoint_sets, find_link, read_platform
from tvm_pipeline.core.platform_text import platform_toml
from tvm_pipeline.errors import PlatformError

GOOD = """
name = "tx2"

[[device]]
name = "denver"
cores = [1, 2]
target = "llvm -mcpu=cortex-a57"
memory_bytes = 1000000
active_w = 4

[[device]]
name = "a57"
backend = "jetson"

[[link]]
source = "denver"
destination = "a57"
latency_s = 2e-5
bandwidth_bytes_per_s = 4e9
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "platform.toml"
    path.write_bytes(text.encode("latin-1"))
    return path


def test_a_file_says_devices_and_links(tmp_path: Path) -> None:
    platform = read_platform(write(tmp_path, GOOD))
    assert platform == Platform(
        "tx2",
        (Device("denver", "host", (1, 2), "llvm -mcpu=cortex-a57", 1_000_000, 4.0), Device("a57", "jetson")),
        (Link("denver", "a57", 2e-5, 4e9),),
    )
    assert platform.device("a57").backend == "jetson"
    with pytest.raises(PlatformError, match="tx2 has no device gpu; it has denver, a57"):
        platform.device("gpu")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('name = "tx2"\n', "", "platform.toml: it has no name; `tvm-pipeline devices -o FILE` writes one"),
        ('name = "tx2"', 'name = tx2"', "Invalid value"),
        ('name = "tx2"', 'name = "tx2"\nnmae = 1', "line 3: there is no key nmae; did you mean name?"),
        (
            "memory_bytes",
            "memroy_bytes",
            "line 8: device denver: there is no key memroy_bytes; did you mean memory_bytes?",
        ),
        ("active_w = 4", 'stand_in = "a CPU"', "line 9: device denver: it takes no stand_in: .* leave it out"),
        ("latency_s", "latency_ms", "line 18: link number 1: there is no key latency_ms; did you mean latency_s?"),
        ('"a57"\nbackend', '"denver"\nbackend', "platform tx2: two devices are called denver"),
        ('destination = "a57"', 'destination = "gpu"', "a link names gpu, which is not a device"),
        ('source = "denver"', 'source = "cpu"', "a link names cpu, which is not a device"),
        ("1000000", "0", "denver: memory_bytes, active_w, .* must be positive"),
        ("1000000", '"1 MB"', "line 8: device denver: memory_bytes: Expected `int`, got `str`"),
        ("active_w = 4", "active_w = -4", "denver: memory_bytes, active_w, .* must be positive"),
        ("active_w = 4", "most_stages = 0", "denver: memory_bytes, active_w, .* must be positive"),
        ("active_w = 4", "active_w = nan", "denver: memory_bytes, active_w, .* must be positive"),
        ("active_w = 4", "active_w = inf", "denver: memory_bytes, active_w, .* must be positive"),
        ("[1, 2]", "[1, 1]", r"device denver: cores \[1, 1\]"),
        ("[1, 2]", "[-1]", r"device denver: cores \[-1\]"),
        ("[1, 2]", '["1"]', "line 6: device denver: cores: Expected `int`, got `str`"),
        ("2e-5", "-1.0", "link denver -> a57: latency_s must not be negative"),
        ("2e-5", "nan", "link denver -> a57: latency_s"),
        ("2e-5", "inf", "link denver -> a57: latency_s"),
        ("4e9", "0", "bandwidth_bytes_per_s must be positive"),
        ("4e9", "nan", "bandwidth_bytes_per_s must be positive"),
        ("[[device]]", "[device]", "platform.toml"),
        ('"a57"\nbackend', '"a 57"\nbackend', "called 'a 57'; its name must be one word"),
        ('"a57"\nbackend', '""\nbackend', "called ''; its name must be one word"),
        ('"a57"\nbackend', '"caf\xe9"\nbackend', "utf-8"),
        ("4e9", '4e9\n[[link]]\nsource="denver"\ndestination="a57"', "two links join the same"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_name(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in GOOD
    path = write(tmp_path, GOOD.replace(before, after, 1))
    with pytest.raises(PlatformError, match=message) as raised:
        read_platform(path)
    assert str(raised.value).startswith((f"{path}: ", f"{path}, line "))


MODELLED = """
name = "coral"

[[device]]
name = "tpu0"
backend = "edgetpu"
cache_bytes = 8388608
bus = "usb"

[device.model]
macs_per_s = 4e12
call_s = 0.0005
input_bytes_per_s = 3e8
cached_bytes = 8388608
refill_bytes_per_s = 3.2e8

[[device]]
name = "cpu"

[[link]]
source = "cpu"
destination = "tpu0"
bandwidth_bytes_per_s = 4e9
bus = "usb"
"""


def test_a_file_says_models_and_buses(tmp_path: Path) -> None:
    model = DeviceModel(
        macs_per_s=4e12, call_s=0.0005, input_bytes_per_s=3e8, cached_bytes=8388608, refill_bytes_per_s=3.2e8
    )
    platform = read_platform(write(tmp_path, MODELLED))
    assert platform == Platform(
        "coral",
        (Device("tpu0", "edgetpu", cache_bytes=8388608, bus="usb", model=model), Device("cpu")),
        (Link("cpu", "tpu0", 0.0, 4e9, bus="usb"),),
    )
    assert read_platform(write(tmp_path, platform_toml(platform))) == platform


def test_a_calibrated_roofline_is_written_with_its_error(tmp_path: Path) -> None:
    kinds = (KindFactor("conv2d 1x1 float32", 1.25), KindFactor('a "kind"', 0.5))
    model = DeviceModel(2e9, 1e-6, bytes_per_s=8e9, kind=kinds, error=0.08)
    platform = Platform("box", (Device("cpu0", model=model, cores=(0,)), Device("cpu1")), (Link("cpu0", "cpu1"),))
    text = platform_toml(platform, ["fitted\nto stages", "", "by hand"])
    assert text.splitlines()[:5] == ["# fitted", "# to stages", "#", "# by hand", ""]
    assert read_platform(write(tmp_path, text)) == platform


@pytest.mark.parametrize("error", ["-0.1", "inf", "nan"])
def test_a_model_s_error_is_a_share(tmp_path: Path, error: str) -> None:
    text = f'name = "box"\n[[device]]\nname = "cpu0"\n[device.model]\nerror = {error}\n'
    with pytest.raises(PlatformError, match="platform box, device cpu0: in its model"):
        read_platform(write(tmp_path, text))


@given(randoms())
def test_what_is_written_reads_back(tmp_path_factory: pytest.TempPathFactory, rng: random.Random) -> None:
    traits = Traits(modelled=True, buses=True, caches=True, powerless=True)
    platform = random_platform(rng, random_chain(rng, 3), rng.randint(1, 4), traits)
    if rng.random() < 0.2:
        endless = (replace(link, bandwidth_bytes_per_s=math.inf) for link in platform.links)
        platform = replace(platform, links=tuple(endless))
    assert read_platform(write(tmp_path_factory.mktemp("platform"), platform_toml(platform))) == platform


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("macs_per_s = 4e12", "macs_per_s = 0", "device tpu0: in its model a time is negative, or a rate not positive"),
        ("macs_per_s = 4e12", "macs_per_s = nan", "platform coral, device tpu0: in its model"),
        ("macs_per_s = 4e12", "macs_per_s = inf", "platform coral, device tpu0: in its model"),
        ("call_s = 0.0005", "call_s = -0.0005", "platform coral, device tpu0: in its model"),
        ("call_s = 0.0005", "call_s = nan", "platform coral, device tpu0: in its model"),
        ("call_s = 0.0005", "operator_s = inf", "platform coral, device tpu0: in its model"),
        ("input_bytes_per_s = 3e8", "output_bytes_per_s = -1.0", "platform coral, device tpu0: in its model"),
        ("cached_bytes = 8388608", "cached_bytes = -1", "platform coral, device tpu0: in its model"),
        ("refill_bytes_per_s = 3.2e8", "refill_bytes_per_s = 0.0", "platform coral, device tpu0: in its model"),
        ("macs_per_s = 4e12", "flops = 4e12", "device tpu0, model: there is no key flops; it takes macs_per_s, call_s"),
        (
            "macs_per_s = 4e12",
            'macs_per_s = "fast"',
            "device tpu0, model: macs_per_s: Expected `float`, got `str`",
        ),
        ("cache_bytes = 8388608", "cache_bytes = 0", "device tpu0: memory_bytes, active_w, .* must be"),
        ("cache_bytes = 8388608", "cache_bytes = -8", "device tpu0: memory_bytes, active_w, .* must be"),
        ('bus = "usb"', "bus = 1", "device tpu0: bus: Expected `str`, got `int`"),
    ],
)
def test_what_is_wrong_in_a_model_is_said_with_the_device(
    tmp_path: Path, before: str, after: str, message: str
) -> None:
    assert before in MODELLED
    path = write(tmp_path, MODELLED.replace(before, after, 1))
    with pytest.raises(PlatformError, match=message) as raised:
        read_platform(path)
    assert str(raised.value).startswith((f"{path}: ", f"{path}, line "))


def test_a_model_by_hand() -> None:
    """2 ms a call, 3 operators of 1 ms each; 6 ms of MACs, beside 15 ms for 300 bytes that the cache does not hold."""
    model = DeviceModel(1e5, 0.002, 0.001, 1e4, 2e4, 200, 2e4)
    assert model.spill_s(500) == pytest.approx(0.015)
    assert model.spill_s(200) == model.spill_s(0) == 0.0
    assert model.seconds(3, 600, 500) == pytest.approx(0.002 + 0.003 + 0.015)
    assert model.seconds(3, 600, 300) == pytest.approx(0.002 + 0.003 + 0.006)  # fetched in 5 ms, beside the work
    assert model.transfer_s(100, 100) == pytest.approx(0.010 + 0.005)


def test_what_a_model_does_not_say_is_free() -> None:
    assert DeviceModel().seconds(9, 10**12, 10**12) == 0.0
    assert DeviceModel().transfer_s(10**12, 10**12) == 0.0
    assert DeviceModel(cached_bytes=0).spill_s(10**12) == 0.0
    assert DeviceModel(refill_bytes_per_s=1.0).spill_s(10**12) == 0.0
    assert DeviceModel(cached_bytes=0, refill_bytes_per_s=1.0).spill_s(5) == 5.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no name"),
        ('name = "bare"', "platform bare has no devices; give it at least one"),
        ('name = "bare"\ndevice = []', "platform bare has no devices; give it at least one"),
        ('name = "bare"\ndevice = ["cpu"]', "line 2: device: Expected `object`, got `str`"),
    ],
)
def test_an_empty_platform_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlatformError, match=message):
        read_platform(write(tmp_path, text))


def test_a_platform_has_a_limit_of_devices() -> None:
    """A board may state any number, and each takes time wherever devices are gone through."""
    with pytest.raises(PlatformError, match="many has 1025 devices; give it 1024 at most"):
        Platform("many", tuple(Device(f"d{number}") for number in range(1025)))


def test_a_missing_file_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match=r"cannot read .*: No such file") as raised:
        read_platform(tmp_path / "absent.toml")
    assert str(raised.value).count("absent.toml") == 1


def test_a_transfer_costs_latency_and_bytes() -> None:
    link = Link("a", "b", 0.5, 100.0)
    assert link.seconds(25) == pytest.approx(0.75)
    assert Link("a", "b", 0.5).seconds(10**9) == 0.5


def test_links_have_a_direction_and_none_is_free() -> None:
    links = (Link("a", "b", 1.0), Link("a", "b", 2.0), Link("a", "a", 3.0))
    assert find_link(links, "a", "b").latency_s == 1.0
    assert find_link(links, "b", "a").seconds(100) == 0.0
    assert find_link(links, "a", "a").seconds(100) == 0.0


@given(randoms())
def test_disjoint_sets_are_all_maximal_sets_without_shared_cores(rng: random.Random) -> None:
    devices = random_platform(rng, random_chain(rng, 1), rng.randint(1, 6), Traits()).devices
    legal = [
        {device.name for device in group}
        for size in range(1, len(devices) + 1)
        for group in itertools.combinations(devices, size)
        if not any(set(a.cores) & set(b.cores) for a, b in itertools.combinations(group, 2))
    ]
    maximal = {frozenset(group) for group in legal if not any(group < other for other in legal)}
    found = [frozenset(device.name for device in group) for group in disjoint_sets(devices)]
    assert len(found) == len(set(found))
    assert set(found) == maximal
