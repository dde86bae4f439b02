"""The command line with Edge TPUs: what stands in for them is said everywhere, and what is wrong in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("ai_edge_litert")
needs("tflite")

from tests.edgetpu.fakes import libedgetpu
from tests.edgetpu.networks import Op, Options, Type, Writer, changed, random_network, schema
from tests.support.command import Outcome, run_command
from tests.support.onnx_models import write_picture_net

PLATFORM = Path(__file__).parents[2] / "profiles" / "platforms" / "coral-usb-2.toml"

pytestmark = pytest.mark.usefixtures("nothing_installed")


@pytest.fixture
def cli(capfd, monkeypatch):
    return lambda *arguments: run_command(capfd, monkeypatch, *arguments)


@pytest.fixture
def devices(plug) -> None:
    """Return both devices of the platform."""
    plug("usb:0,usb:1")


@pytest.fixture
def compiler(install_compiler, tmp_path) -> Path:
    install_compiler()
    return tmp_path / "bin" / "edgetpu_compiler"


def picture_network() -> bytes:
    """Map a picture of 16 x 16 to 4 channels of 8 x 8, in four operators."""
    writer, draw = Writer(), np.random.default_rng(0)

    def convolution(left: int, channels: int) -> int:
        filters = draw.integers(-30, 31, (4, 3, 3, channels)).astype(np.int8)
        bias = writer.tensor((4,), Type.INT32, scale=0.0005, data=np.arange(4, dtype=np.int32))
        reads = [left, writer.tensor(filters.shape, scale=0.01, data=filters), bias]
        made = writer.tensor((*writer.shape(left)[:3], 4))
        options = schema.Conv2DOptionsT(strideW=1, strideH=1)
        return writer.operator(Op.CONV_2D, reads, [made], Options.Conv2DOptions, options, version=3)[0]

    picture = writer.tensor((1, 16, 16, 3))
    seen, pooled = convolution(picture, 3), writer.tensor((1, 8, 8, 4))
    halves = schema.Pool2DOptionsT(strideW=2, strideH=2, filterWidth=2, filterHeight=2)
    writer.operator(Op.MAX_POOL_2D, [seen], [pooled], Options.Pool2DOptions, halves)
    again, joined = convolution(pooled, 4), writer.tensor((1, 8, 8, 4))
    writer.operator(Op.ADD, [pooled, again], [joined], Options.AddOptions, schema.AddOptionsT())
    return writer.content([picture], [joined])


@pytest.fixture
def model(tmp_path) -> Path:
    (tmp_path / "net.tflite").write_bytes(picture_network())
    return tmp_path / "net.tflite"


# Stand-ins are reported


def assert_says_stand_ins(told: dict[str, str], errors: str) -> None:
    assert list(told) == ["tpu0", "tpu1"]
    assert all(f"(Edge TPU usb:{i}: " in what for i, what in enumerate(told.values()))
    assert errors.count("warning: not here: tpu0, tpu1. Stages run on TFLite's CPU kernels (Edge TPU usb:0: ") == 1


def test_every_command_says_what_stands_in(cli, model, tmp_path):
    needs("av")
    needs("tvm_pipeline_video")
    bundle = tmp_path / "net.tar"
    for arguments in (
        ("plan", model, "--platform", PLATFORM),
        ("compile", model, "--platform", PLATFORM, "--stages", 2, "-o", bundle),
        ("plan", bundle),
        ("run", bundle, "--source", "synthetic:32x32@30:12"),
        ("bench", bundle, "--seconds", 0.05, "--rounds", 1),
    ):
        outcome = cli(*arguments, "--json")
        assert outcome.code == 0, outcome.err
        assert_says_stand_ins(outcome.json["stand_ins"], outcome.err)
    measured = cli("run", bundle, "--source", "synthetic:32x32@30:12", "--json").json["measured"]
    assert {stage["device"] for stage in measured["stages"]} == {"tpu0 (stand-in)", "tpu1 (stand-in)"}


def test_what_was_measured_on_stand_ins_is_told_with_the_figures(cli, model, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    outcome = cli("profile", model, "--platform", PLATFORM, "--repeats", 4, "-o", tmp_path / "profile.json")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("tpu0 (stand-in)") == 1
    assert "warning: device tpu1 was not here, measured were TFLite's CPU kernels" in outcome.err
    warnings = json.loads((tmp_path / "profile.json").read_text())["warnings"]
    assert "device tpu1 was not here, measured were TFLite's CPU kernels" in warnings


def test_the_table_of_devices_marks_stand_ins(cli, devices, monkeypatch):
    assert "(stand-in)" not in cli("devices", "--platform", PLATFORM).out
    monkeypatch.setenv("FAKE_EDGETPUS", "usb:1")
    outcome = cli("devices", "--platform", PLATFORM)
    assert outcome.code == 0
    assert "tpu0 (stand-in)" in outcome.out
    assert "tpu1 (stand-in)" not in outcome.out
    listed = cli("devices", "--platform", PLATFORM, "--json").json["devices"]
    assert [bool(device.get("stand_in")) for device in listed] == [True, False]


def command(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Run the command in a new process, which has loaded no library; its searches are small, so they need no numba."""
    code = "from tvm_pipeline.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.thorough
def test_without_the_library_and_with_it():
    without = command("devices", "--platform", PLATFORM, "--json", LD_LIBRARY_PATH="/nowhere")
    there = {"LD_LIBRARY_PATH": str(libedgetpu().parent), "FAKE_EDGETPUS": "usb:0,usb:1"}
    with_it = command("devices", "--platform", PLATFORM, "--json", **there)
    out, _ = without.communicate(timeout=60)
    for device in json.loads(out)["devices"]:
        assert "the library libedgetpu.so.1 cannot be loaded" in device["stand_in"]
        assert "libedgetpu1-std" in device["stand_in"]
    out, errors = with_it.communicate(timeout=60)
    assert not any(device.get("stand_in") for device in json.loads(out)["devices"])
    assert errors == "tpu0: at /sys/bus/usb/devices/1-1\ntpu1: at /sys/bus/usb/devices/1-2\n"


# Devices that are here


def test_devices_that_are_here_run_what_was_compiled(cli, model, devices, compiler, tmp_path):
    needs("av")
    needs("tvm_pipeline_video")
    compiled = cli(
        "compile", model, "--platform", PLATFORM, "--stages", 2, "--verify", 0, "-o", tmp_path / "net.tar", "--json"
    )
    assert compiled.code == 0, compiled.err
    assert compiled.json["stand_ins"] == {}
    assert "not here" not in compiled.err
    assert len((tmp_path / "calls").read_text().splitlines()) == 2
    compiler.unlink()
    outcome = cli("run", tmp_path / "net.tar", "--source", "synthetic:32x32@30:12", "--json")
    assert outcome.code == 0, outcome.err
    assert {stage["device"] for stage in outcome.json["measured"]["stages"]} == {"tpu0", "tpu1"}


@pytest.mark.thorough
def test_a_bundle_whose_device_was_unplugged(cli, model, devices, compiler, tmp_path, monkeypatch):
    needs("av")
    needs("tvm_pipeline_video")
    assert (
        cli("compile", model, "--platform", PLATFORM, "--stages", 2, "--verify", 0, "-o", tmp_path / "net.tar").code
        == 0
    )
    monkeypatch.setenv("FAKE_EDGETPUS", "usb:0")
    for name in ("run", "plan"):
        options = ("--source", "synthetic:32x32@30:3") if name == "run" else ()
        outcome = cli(name, tmp_path / "net.tar", *options)
        fails(outcome, "net.tar", "device tpu1", "usb:1", "plug it in")


@pytest.mark.thorough
def test_a_model_file_is_compiled_again_where_a_stick_has_another_port(cli, model, desk, compiler, tmp_path):
    needs("av")
    needs("tvm_pipeline_video")
    desk(left=False, right=False)
    said = []
    for mbit_per_s in (5000, 5000, 480):
        (tmp_path / "usb" / "left" / "speed").write_text(f"{mbit_per_s}\n")
        outcome = cli("run", model, "--platform", PLATFORM, "--source", "synthetic:32x32@30:3", "--verify", 0)
        assert outcome.code == 0, outcome.err
        said.append(outcome.err)
    assert "was compiled before" in said[1]
    assert "net.tflite is compiled anew: its devices are connected or clocked in another way" in said[2]


# Errors


def fails(outcome: Outcome, *words: str) -> None:
    """Check that the command fails with one line about the reason, and prints nothing else."""
    assert outcome.code == 1, (outcome.out, outcome.err)
    assert outcome.out == ""
    assert outcome.err.count("error: ") == 1
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err


@pytest.mark.thorough
def test_a_compiler_that_fails_leaves_no_bundle(cli, model, devices, compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_EDGETPU_COMPILER", "fail")
    (tmp_path / "out").mkdir()
    words = "edgetpu_compiler ended with exit code 1", "net", "Its last lines:"
    fails(cli("compile", model, "--platform", PLATFORM, "-o", tmp_path / "out" / "net.tar"), *words)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.thorough
def test_ctrl_c_ends_a_compiler_that_hangs(model, compiler, tmp_path):
    (tmp_path / "out").mkdir()
    there = {"LD_LIBRARY_PATH": str(libedgetpu().parent), "FAKE_EDGETPUS": "usb:0,usb:1"}
    process = command(
        *("compile", model, "--platform", PLATFORM, "-o", tmp_path / "out" / "net.tar"),
        **there,
        FAKE_EDGETPU_COMPILER="hang",
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "calls").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [line for line in running() if str(compiler) in line]
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in errors
    assert list((tmp_path / "out").iterdir()) == []
    deadline = time.monotonic() + 60
    while [line for line in running() if str(compiler) in line]:  # killed, and gone a moment later
        assert time.monotonic() < deadline
        time.sleep(0.02)


def running() -> list[str]:
    """Return the command lines of all processes."""
    lines = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(process.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended
            continue
    return lines


def first_subgraph(change):
    return lambda parsed: change(parsed.subgraphs[0])


def _float(graph):
    for tensor in graph.tensors:
        tensor.type = Type.FLOAT32 if tensor.type == Type.INT8 else tensor.type


def _mixed(graph):
    graph.tensors[graph.operators[-1].outputs[0]].type = Type.UINT8


def _open(graph):
    graph.tensors[graph.inputs[0]].shapeSignature = [1, -1, -1, 3]


def _open_inside(graph):
    graph.tensors[graph.operators[0].outputs[0]].shapeSignature = [1, -1, -1, 4]


def _variable(graph):
    graph.tensors[graph.operators[0].outputs[0]].isVariable = True


def _two_subgraphs(parsed):
    parsed.subgraphs.append(parsed.subgraphs[0])


def custom(name):
    def change(parsed):
        code = parsed.operatorCodes[0]
        code.builtinCode, code.deprecatedBuiltinCode, code.customCode = Op.CUSTOM, Op.CUSTOM, name

    return change


BAD = [
    (first_subgraph(_float), ("computes in float32", "TFLITE_BUILTINS_INT8"), False),
    (first_subgraph(_mixed), ("operator add_3", "mixes int8 and uint8", "quantize operator between"), False),
    (first_subgraph(_open), ("tensor/0:0", "open shape [1, -1, -1, 3]"), True),
    (
        first_subgraph(_open_inside),
        ("operator conv_2d_0", "open shape [1, -1, -1, 4]"),
        True,
    ),
    (first_subgraph(_variable), ("keeps a state between runs", "cannot be cut"), True),
    (_two_subgraphs, ("2 subgraphs", "only models with one can be cut"), True),
    (custom("TFLite_Detection_PostProcess"), ("'TFLite_Detection_PostProcess'", "convert the model without it"), True),
    (custom("edgetpu-custom-op"), ("edgetpu_compiler has compiled", "give the .tflite that it was made from"), True),
]


@pytest.mark.parametrize(("change", "words", "is_refused_by_slice"), BAD)
def test_a_model_that_an_edge_tpu_cannot_take(cli, tmp_path, change, words, is_refused_by_slice):
    bad = tmp_path / "bad.tflite"
    bad.write_bytes(changed(picture_network(), change))
    fails(cli("plan", bad, "--platform", PLATFORM), "bad.tflite", *words)
    fails(cli("compile", bad, "--platform", PLATFORM, "-o", tmp_path / "bad.tar"), "bad.tflite", *words)
    assert not (tmp_path / "bad.tar").exists()
    if is_refused_by_slice:
        fails(cli("slice", bad, "--graph", tmp_path / "graph.json"), "bad.tflite", *words)
        assert not (tmp_path / "graph.json").exists()


def test_a_model_of_another_format(cli, tmp_path):
    needs("onnx")
    onnx = write_picture_net(tmp_path / "picture.onnx")
    told = "an Edge TPU takes .tflite: convert it to int8 TFLite, or leave the Edge TPUs out of the platform"
    fails(cli("plan", onnx, "--platform", PLATFORM), "picture is onnx", told)
    fails(cli("compile", "squeezenet", "--platform", PLATFORM, "-o", tmp_path / "net.tar"), "squeezenet", told)


@pytest.mark.thorough
def test_more_stages_than_devices(cli, tmp_path):
    (tmp_path / "net.tflite").write_bytes(random_network(4))
    told = "5 stages need as many devices that share no cores; platform coral-usb-2 has 2"
    fails(cli("plan", tmp_path / "net.tflite", "--platform", PLATFORM, "--stages", 5), told)
    fails(
        cli("compile", tmp_path / "net.tflite", "--platform", PLATFORM, "--stages", 5, "-o", tmp_path / "a.tar"), told
    )
    assert not (tmp_path / "a.tar").exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('target = ""', ("device tpu0 does not say which Edge TPU it is", "usb:0")),
        ('target = "usb:0"\ncores = [4095]', ("device tpu0 names cores [4095]", "`cores`")),
        ('target = "cpu"\nbackend = "edge-tpu"', ("there is no backend edge-tpu; did you mean", "edgetpu")),
    ],
)
def test_a_platform_file_that_cannot_be_used(cli, model, tmp_path, line, words):
    backend = "" if "backend" in line else 'backend = "edgetpu"'
    platform = tmp_path / "desk.toml"
    platform.write_text(f'name = "desk"\n[[device]]\nname = "tpu0"\n{backend}\n{line}\n')
    fails(cli("plan", model, "--platform", platform), *words)
    fails(cli("devices", "--platform", platform), *words)
