"""`tvm-pipeline check` passes on what works here, and names each fault that is planted."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np
import pytest

from tests.support.parts import needs

needs("onnxruntime")

from tests.edgetpu.fakes import libedgetpu, preload_libedgetpu, write_compiler
from tests.support.board_trees import TREES, write
from tests.support.crashes import install
from tests.support.guests import Lamp, guests
from tvm_pipeline.backends.contract import Delegating
from tvm_pipeline.cli import check
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.power import Survey
from tvm_pipeline.processes import Child
from tvm_pipeline.profiling.throttling import ThrottleWatch
from tvm_pipeline.testing import cut_cases

MINUTES = 0.005
Report = dict[tuple[str, str], dict]


@pytest.fixture
def checked(cli, tmp_path, monkeypatch) -> Iterator[Callable[..., tuple[int, Report]]]:
    """Runs the check on devices, given as (backend, target), of a core each, and returns its status and its claims.

    Without devices it is this machine. There are no sensors of power unless the test gives some.
    """
    install(tmp_path, "faulty", "tests.support.faulty_device")
    monkeypatch.syspath_prepend(tmp_path)

    def run(*devices: tuple[str, str], options: tuple[object, ...] = ()) -> tuple[int, Report]:
        file = tmp_path / "machine.toml"
        lines = [
            f"[[device]]\nname = '{backend}{core}'\nbackend = '{backend}'\ntarget = '{target}'\n"
            + (f"cores = [{core}]\n" if backend in ("host", "faulty", "onnxruntime", "openvino") else "")
            for core, (backend, target) in enumerate(devices)
        ]
        file.write_text("name = 'test'\n" + "".join(lines))
        platform = ("--platform", file) if devices else ()
        outcome = cli("check", *platform, "--minutes", MINUTES, "-o", tmp_path / "check.json", *options)
        claims = json.loads((tmp_path / "check.json").read_text())["claims"]
        printed = " ".join(outcome.out.split())
        assert all(f"{claim['subject']}: {claim['claim']}: " in printed for claim in claims)
        return outcome.code, {(claim["subject"], claim["claim"]): claim for claim in claims}

    with guests():
        yield run


def states(report: Report, subject: str) -> dict[str, str]:
    return {claim: found["state"] for (of, claim), found in report.items() if of == subject}


ALL = dict.fromkeys(("detection", "operator", "transfers", "slices"), "passed")


def failed(report: Report) -> dict[tuple[str, str], str]:
    return {key: claim["told"] for key, claim in report.items() if claim["state"] == "failed"}


@pytest.fixture
def in_this_process(monkeypatch) -> None:
    """What a child would try is tried here: a child takes two seconds to start. Models are cut at one place."""

    def answers(order: check.CheckRequest, subject: str) -> Iterator[check.Claim]:
        if order.device.startswith("host"):  # alone it is tried by `test_it_passes_on_this_machine`
            return
        for claim in (check._device_claims if order.device else check._pipeline_claims)(order):
            yield msgspec.structs.replace(claim, subject=subject)

    monkeypatch.setattr(check, "_answers", answers)
    monkeypatch.setattr(cut_cases, "MOST_CUTS", 1)


@pytest.mark.thorough
@pytest.mark.usefixtures("in_this_process")
def test_it_passes_on_this_machine(checked):
    code, report = checked()
    assert failed(report) == {}
    assert code == 0
    assert [states(report, of) for of, claim in report if claim == "operator"] == [ALL]
    assert report["machine", "pipeline"]["figures"]["frames"] > 10
    assert report["machine", "pulled device"]["state"] == "not tried"


def test_devices_that_the_pipeline_does_not_use_are_named():
    """An Edge TPU takes no ONNX model, and onnxruntime no other."""
    cores = [Device(name, "onnxruntime", (0,), "cpu") for name in ("core", "same")]
    machine = Platform("test", (*cores, Device("tpu", "edgetpu", target="usb:0"), Device("card", "gpu")))
    pipeline, _ = check._pipeline_claims(
        check.CheckRequest(machine, "", {"card": "operator failed"}, 0.2, False, False)
    )
    assert pipeline.state == "passed", pipeline.told
    assert "on single (core); without card (operator failed), tpu (branches is onnx, " in pipeline.told
    assert pipeline.told.endswith(", same (core has its cores)")


@pytest.fixture
def only(in_this_process, monkeypatch) -> Callable[..., None]:
    """Of the claims about a device tries those that are named, and no pipeline, unless that is named."""

    def choose(*names: str) -> None:
        monkeypatch.setattr(
            check, "ON_DEVICE", {name: check.ON_DEVICE[name] for name in names if name in check.ON_DEVICE}
        )
        if "pipeline" not in names:
            monkeypatch.setattr(check, "_pipeline_claims", lambda _: iter(()))

    return choose


@pytest.mark.needs("openvino")
@pytest.mark.thorough
def test_the_pipeline_passes_on_engines_beside_each_other(checked, only):
    only("pipeline")
    code, report = checked(("onnxruntime", "cpu"), ("openvino", ""))
    assert (code, failed(report)) == (0, {})
    assert " | " in report["machine", "pipeline"]["told"]


@pytest.mark.needs("tflite")
@pytest.mark.needs("ai_edge_litert")
@pytest.mark.thorough
@pytest.mark.usefixtures("in_this_process")
def test_only_the_option_accepts_kernels_of_tflite_in_place_of_an_edge_tpu(checked):
    code, report = checked(("edgetpu", "cpu"))
    assert code == 1
    assert "TFLite's CPU kernels (its target asks for them) stands in" in failed(report)["edgetpu0", "detection"]


def test_transfers_to_a_device_with_memory_of_its_own_have_rates(checked, only, monkeypatch):
    only("transfers")
    seconds = np.broadcast_to([1e-6, 1e-2], (2, check.REPEATS, 2))
    monkeypatch.setattr(Delegating, "time_transfers", lambda *_: seconds)
    code, report = checked(("faulty", "none"))
    assert (code, failed(report)) == (0, {})
    assert report["faulty0", "transfers"]["figures"]["received_bytes_per_s"] == pytest.approx(6.71e9, rel=0.01)


@pytest.mark.needs("PoCL")
@pytest.mark.thorough
def test_pocl_copies_nothing(checked, only):
    """It is software, which only the option accepts, and a rate of copies would mean nothing."""
    only("transfers")
    code, report = checked(("gpu", "opencl"), options=("--stand-ins",))
    assert (code, failed(report)) == (0, {})
    assert report["gpu0", "transfers"]["told"].endswith("computes in the host's memory: nothing is copied")
    assert report["gpu0", "transfers"]["figures"] == {}
    code, report = checked(("gpu", "opencl"))
    assert code == 1
    assert failed(report)["gpu0", "detection"].startswith("PoCL (software, CPU cores 0")


@pytest.fixture
def plugged(tmp_path, monkeypatch) -> Callable[..., None]:
    """Plugs in a fake Edge TPU at usb:0, with the fake library built for some names, and the fake compiler."""
    needs("ai_edge_litert")
    needs("tflite")

    from tvm_pipeline_edgetpu.delegate import PATHS

    def plug(*defines: str) -> None:
        (tmp_path / "bin").mkdir()
        write_compiler(tmp_path / "bin")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(libedgetpu(*defines).parent))
        monkeypatch.setenv("FAKE_EDGETPUS", "usb:0")
        monkeypatch.setenv(PATHS, "{}")

    return plug


@pytest.mark.thorough
def test_it_passes_on_a_fake_edge_tpu(checked, plugged, only):
    """`edgetpu/test_backend.py` cuts models on it."""
    only("operator", "transfers", "pipeline")
    plugged()
    preload_libedgetpu()
    code, report = checked(("edgetpu", "usb:0"))
    assert (code, failed(report)) == (0, {})
    assert states(report, "edgetpu0") == dict.fromkeys(("detection", "operator", "transfers"), "passed")


@pytest.mark.thorough
def test_a_libedgetpu_of_another_tensorflow_is_named(checked, plugged):
    plugged("KERNEL", "TF_2_5")
    code, report = checked(("edgetpu", "usb:0"))
    assert code == 1
    assert (
        "libedgetpu.so.1 (BuildLabel(FAKE), RuntimeVersion(14)) ended by SIG" in failed(report)["edgetpu0", "operator"]
    )


def test_a_missing_libedgetpu_is_named(checked):
    needs("ai_edge_litert")  # and a process that no test has given a libedgetpu
    code, report = checked(("edgetpu", "usb:0"))
    assert code == 1
    assert "the library libedgetpu.so.1 cannot be loaded" in failed(report)["edgetpu0", "detection"]
    assert states(report, "edgetpu0")["operator"] == "not tried"
    assert report["machine", "pipeline"]["told"] == "no device can be used: edgetpu0 (detection failed)"


class Impatient(Child):
    """Waits for the first claim, as a process takes seconds to start, and a second for each of the others."""

    _most_s = math.inf

    def receive(self, end_s):
        answer = super().receive(min(end_s, time.monotonic() + self._most_s))
        self._most_s = 1.0
        return answer


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("fault", "claim", "told"),
    [
        ("computes", "operator", "1 of 2048 values of the convolution are not numpy's; update the device's driver"),
        ("missing", "detection", "libfaulty.so.1 cannot be loaded; install the package faulty"),
        ("changes", "transfers", "1 of 32768 values of the addition are not numpy's; try another cable"),
        ("loses", "pipeline", " has the values of frame "),
        ("crashes", "operator", "its process was killed by SIGSEGV"),
        ("slices", "slices", "the model gives other results than whole: output y is off by up to"),
        ("fails", "pipeline", "the driver is gone"),
        ("hangs", "operator", "its process took more than 600 s and was ended; plug the device in again"),
    ],
)
def test_a_fault_of_a_device_is_named(checked, monkeypatch, request, fault, claim, told):
    if fault not in ("crashes", "hangs"):
        request.getfixturevalue("in_this_process")
    if fault == "hangs":
        monkeypatch.setattr(check, "Child", Impatient)
    code, report = checked(("faulty", fault))
    subject = "machine" if claim == "pipeline" else "faulty0"
    assert code == 1
    assert told in failed(report)[subject, claim]
    assert states(report, subject)[claim] == "failed"
    if fault in ("crashes", "missing", "hangs"):
        assert set(states(report, "faulty0").values()) <= {"failed", "passed", "not tried"}
        assert states(report, "faulty0")["slices"] == "not tried"
    if fault in ("computes", "loses", "changes"):  # and nothing else is
        assert list(failed(report)) == [(subject, claim)]


@pytest.mark.thorough
def test_a_device_that_is_pulled_out_costs_no_frame(checked, monkeypatch):
    of_children = check._answers
    monkeypatch.setattr(check, "_answers", lambda order, of: () if order.device else of_children(order, of))
    code, report = checked(("faulty", "none"), ("faulty", "unplugged"), options=("--pull",))
    assert (code, failed(report)) == (0, {})
    assert report["machine", "pulled device"]["state"] == "passed"
    assert "was killed by SIGSEGV" in report["machine", "pulled device"]["told"]


@pytest.mark.thorough
def test_where_nobody_pulls_a_device_out_that_is_not_tried(checked, only):
    only("pipeline")
    code, report = checked(("faulty", "none"), options=("--pull",))
    assert code == 0
    assert report["machine", "pulled device"]["told"] == "no device was pulled out"


# The machine: what needs no device


@pytest.fixture
def no_devices(monkeypatch) -> None:
    """Nothing is asked of a device."""
    monkeypatch.setattr(check, "_answers", lambda *_: iter(()))


@pytest.mark.usefixtures("no_devices")
def test_a_wrong_version_is_named(checked, tmp_path):
    assert checked()[1]["machine", "versions"]["state"] == "passed"
    package = tmp_path / "onnx-1.2.3.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: onnx\nVersion: 1.2.3\n")
    code, report = checked()
    assert code == 1
    assert "onnx 1.2.3 is installed; run `pip install 'onnx" in failed(report)["machine", "versions"]


@pytest.mark.usefixtures("no_devices")
@pytest.mark.parametrize("board", TREES)
def test_a_throttled_board_is_named(checked, tmp_path, monkeypatch, board):
    root = TREES[board].write(tmp_path / "root")
    monkeypatch.setattr(check, "ThrottleWatch", partial(ThrottleWatch, root))
    code, report = checked()
    assert code == 0
    hottest = max(celsius for celsius in TREES[board].zones.values() if celsius < 100_000) / 1000
    assert report["machine", "throttling"]["told"] == f"no sign of it; the hottest zone has {hottest:.0f} °C"
    zone = next(number for number, name in enumerate(TREES[board].zones) if name.lower().startswith("gpu"))
    write(root, f"sys/class/thermal/thermal_zone{zone}/temp", "109500\n")
    code, report = checked()
    assert code == 1
    name = [*TREES[board].zones][zone]
    assert f"the machine was throttled: {name} is slowed down from " in failed(report)["machine", "throttling"]


@pytest.mark.usefixtures("no_devices")
def test_clocks_that_follow_the_load_are_named(checked, tmp_path, monkeypatch):
    needs("tvm_pipeline_boards")
    from tvm_pipeline_boards.mode_switch import BoardModes

    root = TREES["Orin Nano Super, JetPack 6"].write(tmp_path / "root")
    assert checked()[1]["machine", "clocks"]["state"] == "not tried"
    monkeypatch.setattr(check, "power_modes", lambda: BoardModes(root))
    assert checked()[1]["machine", "clocks"]["state"] == "passed"
    for name, khz in (("min", 115200), ("max", 1728000)):
        write(root, f"sys/devices/system/cpu/cpufreq/policy0/scaling_{name}_freq", f"{khz}\n")
    code, report = checked()
    assert code == 1
    assert "jetson_clocks is off" in failed(report)["machine", "clocks"]


class Nothing(Lamp):
    """A sensor of the board that reads 0 W."""

    def watts(self) -> float:
        return 0.0


class Silent(Lamp):
    """A sensor whose value never changes its moment."""

    name = "silent"

    def read(self):
        return [super().read()[0]._replace(time_s=1.0)]


@pytest.mark.usefixtures("no_devices")
def test_sensors_of_power_that_read_nothing_are_named(checked):
    found = Survey([Lamp(), Silent()], {"rapl:psys": "only root may read it; run as root"})
    with guests(sensors=lambda: found):
        code, report = checked()
    assert code == 1
    assert report["lamp", "power"]["figures"] == {"watts": pytest.approx(10.0)}
    assert failed(report) == {
        ("silent", "power"): "no second reading came within 0.5 s",
        ("rapl:psys", "power"): "only root may read it; run as root",
    }
    with guests(sensors=lambda: Survey([Nothing()], {})):
        assert failed(checked()[1]) == {
            ("lamp", "power"): "the test cannot draw 0 W: its sensor stands still, or is not wired"
        }
