"""Which Edge TPUs there are: those of a platform file, those that are plugged in, and what stands in for the others."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.parts import needs

needs("ai_edge_litert")

from ai_edge_litert.interpreter import load_delegate

from tests.edgetpu.fakes import preload_libedgetpu, usb_device
from tests.edgetpu.networks import random_network
from tests.support.command import run_command
from tvm_pipeline import read_platform
from tvm_pipeline.backends.registry import detect_platform, find_backend, settle_platform
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import PlatformError
from tvm_pipeline.workflow.doubts import known_devices
from tvm_pipeline_edgetpu import backend, delegate
from tvm_pipeline_edgetpu.edgetpu import MODELS

PLATFORMS = Path(__file__).parents[2] / "profiles" / "platforms"
NETWORK = random_network(4)

pytestmark = pytest.mark.usefixtures("nothing_installed")


def tpus(*addresses: str, **options: Any) -> Platform:
    devices = tuple(Device(f"tpu{i}", "edgetpu", target=target, **options) for i, target in enumerate(addresses))
    return Platform("a desk", devices)


def test_a_device_that_is_not_here_is_stood_in_for_and_says_so():
    lead, settled = settle_platform(tpus("usb:0", "pci:0"))
    assert lead is backend is find_backend("edgetpu")
    assert list(settled.stand_ins) == ["tpu0", "tpu1"]
    for device in settled.devices:
        assert device.stand_in.startswith(f"TFLite's CPU kernels (Edge TPU {device.target}: ")
        assert "libedgetpu.so.1" in device.stand_in
        assert "\n" not in device.stand_in
        assert device.label == f"{device.name} (stand-in)"
        assert device.model == MODELS[device.target[:3]]  # it can be planned for


def test_the_cpu_kernels_may_be_asked_for():
    _, settled = settle_platform(tpus("cpu"))
    assert settled.stand_ins == {"tpu0": "TFLite's CPU kernels (its target asks for them)"}
    assert settled.devices[0].model is None  # no figure of an Edge TPU is one of a CPU


def test_a_device_has_to_say_which_one_it_is():
    with pytest.raises(PlatformError, match=r"device tpu0 does not say which Edge TPU it is; give `target`, .*usb:0"):
        settle_platform(tpus(""))


@pytest.mark.parametrize("target", ["usb:0", "cpu"])
def test_cores_that_are_not_there(target):
    with pytest.raises(PlatformError, match=r"device tpu0 names cores \[4095\]; this process may use"):
        settle_platform(tpus(target, cores=(4095,)))


def test_a_device_that_is_here_is_no_stand_in(plug):
    plug("usb:0,usb:1,pci:0")
    _, settled = settle_platform(tpus("usb:0", "usb:1", "pci:0"))
    assert settled.stand_ins == {}
    assert [device.label for device in settled.devices] == ["tpu0", "tpu1", "tpu2"]
    assert [device.model for device in settled.devices] == [MODELS["usb"], MODELS["usb"], MODELS["pci"]]


def test_what_the_platform_file_says_of_a_device_stays(plug):
    plug("usb:0")
    own = DeviceModel(macs_per_s=1e9)
    _, settled = settle_platform(tpus("usb:0", model=own, cache_bytes=7, bus="hub"))
    assert settled == tpus("usb:0", model=own, cache_bytes=7, bus="hub")


def test_a_library_without_the_device(plug):
    plug("usb:0")
    _, settled = settle_platform(tpus("usb:0", "usb:1"))
    assert list(settled.stand_ins) == ["tpu1"]
    assert "Edge TPU usb:1: libedgetpu.so.1 cannot open it" in settled.stand_ins["tpu1"]


@pytest.mark.parametrize("path", sorted(PLATFORMS.glob("coral-*.toml")), ids=lambda path: path.stem)
def test_the_figures_filled_in_are_those_of_the_platform_files(path):
    for device in read_platform(path).devices:
        assert device.model == MODELS[device.target[:3]]
        [filled] = [found for found in backend_devices(device.target) if found.target == device.target]
        assert (filled.cache_bytes, backend.settle(filled).model) == (device.cache_bytes, device.model)


def backend_devices(address: str) -> list[Device]:
    """Return the devices that `detect` finds for this address."""
    kind, index = address.split(":")
    with pytest.MonkeyPatch.context() as patch:
        plug_into_pycoral(patch, *[kind] * (int(index) + 1))
        return list(backend.detect())


def plug_into_pycoral(patch: pytest.MonkeyPatch, *kinds: str) -> None:
    """Install a fake of Google's pycoral, which lists the devices that are plugged in."""
    pycoral = ModuleType("pycoral.utils.edgetpu")
    pycoral.list_edge_tpus = lambda: [{"type": kind, "path": "/sys"} for kind in kinds]
    pycoral.load_edgetpu_delegate = lambda options: load_delegate("libedgetpu.so.1", options)
    patch.setitem(sys.modules, "pycoral.utils.edgetpu", pycoral)


def test_devices_that_are_plugged_in_are_detected(plug, monkeypatch):
    plug("usb:0,usb:1,pci:0")
    plug_into_pycoral(monkeypatch, "usb", "pci", "usb")
    found = backend.detect()
    assert [(device.name, device.target) for device in found] == [
        ("tpu0", "usb:0"),
        ("tpu1", "usb:1"),
        ("tpu2", "pci:0"),
    ]
    settled = [backend.settle(device) for device in found]
    assert settled == [replace(device, model=MODELS[device.target[:3]]) for device in found]


@pytest.fixture
def ports(tmp_path, monkeypatch) -> Path:
    """Plug two sticks in, in the form of /sys/bus/usb/devices: one of them is cold, and at a port of USB 2."""
    preload_libedgetpu()
    usb = tmp_path / "usb"
    monkeypatch.setattr(delegate, "USB", usb)
    monkeypatch.setenv(delegate.PATHS, "{}")
    monkeypatch.setenv("FAKE_EDGETPU_USB", str(usb))
    usb_device(usb, "2-1.4", "18d1", "9302", devnum="3", speed="5000")
    usb_device(usb, "1-2", "1a6e", "089a", devnum="4", speed="480")
    return usb


def test_what_a_stick_is_and_where_is_told(ports, tmp_path, capfd, monkeypatch):
    (tmp_path / "desk.toml").write_text(
        'name = "desk"\n[[device]]\nname = "slow"\nbackend = "edgetpu"\ntarget = "usb:0"\n'
        '[[device]]\nname = "fast"\nbackend = "edgetpu"\ntarget = "usb:1 Performance=Low"\n'
    )
    outcome = run_command(capfd, monkeypatch, "devices", "--platform", tmp_path / "desk.toml", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.err == (
        "slow: USB 2, 480 Mbit/s; at /sys/bus/usb/devices/1-2; parameters beyond its cache come slowly by USB 2; plug "
        "it into a port of USB 3 fast: USB 3, 5000 Mbit/s, Performance=Low; at /sys/bus/usb/devices/2-1.4"
    )
    assert (ports / "opened").read_text().split() == ["1-2", "2-1.4,Performance=Low"]
    _, settled = settle_platform(read_platform(tmp_path / "desk.toml"))
    assert [device.model for device in settled.devices] == [MODELS["usb 2"], MODELS["usb"]]
    assert known_devices(settled) == {
        "device slow": "USB 2, 480 Mbit/s",
        "device fast": "USB 3, 5000 Mbit/s, Performance=Low",
    }


@pytest.mark.parametrize("other", ["usb", ":0", "usb:0 Performance=Low"])
def test_two_devices_of_one_port_are_refused(ports, other):
    with pytest.raises(PlatformError, match=r"tpu0 \(usb:0\) and tpu1 \(.*\) are one Edge TPU, that at /sys.*/1-2; "):
        settle_platform(tpus("usb:0", other))
    settle_platform(tpus("usb:0", "usb:1", "cpu", "cpu", "usb:7", "usb:8"))  # stand-ins are no devices


@pytest.mark.parametrize(
    ("millidegrees", "told"),
    [
        (64250, "at /dev/apex_0; 64.25 °C, slowed down from 85, 90, 95 °C on"),
        (90000, "at /dev/apex_0; 90 °C, slowed down from 85, 90, 95 °C on, and so it is now"),
    ],
)
def test_the_heat_of_a_pcie_device_is_told(plug, tmp_path, monkeypatch, millidegrees, told):
    """The files and the usual trip points are those of https://coral.ai/docs/pcie-parameters."""
    plug("pci:0")
    monkeypatch.setattr(delegate, "APEX", tmp_path)
    (tmp_path / "apex_0").mkdir()
    for name, value in {"temp": millidegrees, **{f"trip_point{i}_temp": 85000 + 5000 * i for i in range(3)}}.items():
        (tmp_path / "apex_0" / name).write_text(f"{value}\n")
    assert backend.state(backend.settle(tpus("pci:0").devices[0])) == told


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Model("picture", "onnx", b""), "picture is onnx, an Edge TPU takes .tflite: convert it"),
        (Model("squeezenet", "relay.testing", b""), "squeezenet is relay.testing"),
        (Model("net", "tflite", NETWORK[:99]), "damaged TFLite file"),
    ],
)
def test_a_model_that_edge_tpus_do_not_take_leaves_them_out(monkeypatch, caplog, model, words):
    needs("tvm")
    plug_into_pycoral(monkeypatch, "usb", "usb")
    with caplog.at_level(logging.WARNING):
        platform = detect_platform(model)
    assert {device.backend for device in platform.devices} == {"host"}
    assert "tpu0, tpu1 left out: " in caplog.text
    assert words in caplog.text


def test_a_model_that_they_take_keeps_them(monkeypatch, caplog):
    plug_into_pycoral(monkeypatch, "usb")
    platform = detect_platform(Model("net", "tflite", NETWORK))
    assert "tpu0" in [device.name for device in platform.devices]
    assert "left out" not in caplog.text
