"""The example backend: a package of its own that keeps the contract and shares a model with the host."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")
needs("onnx")

from tests.support.command import run_command
from tests.support.fake_backend import make_plan
from tests.support.installed import install
from tests.support.onnx_models import write_picture_net
from tvm_pipeline import (
    Bundle,
    Pipeline,
    Problem,
    evaluate,
    load,
    open_bundle,
    planning,
    profile_model,
    write_bundle,
)
from tvm_pipeline.backends.contract import Array, Backend
from tvm_pipeline.backends.registry import detect_platform, settle_platform
from tvm_pipeline.core.graph import crossing_tensors
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline.testing import check_backend
from tvm_pipeline_tvm.host import backend as host

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLE = Path(__file__).parents[2] / "examples" / "device_backend"


@pytest.fixture(scope="module")
def modelled() -> Iterator[Backend]:
    """Yield the backend that the entry point of the example's package names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
        [(name, named)] = project["entry-points"]["tvm_pipeline.backends"].items()
        module, _, attribute = named.partition(":")
        backend = getattr(importlib.import_module(module), attribute)
        assert backend.name == name
        yield backend
        backend.close()


@pytest.fixture
def beside_the_host(modelled: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, modelled, host, own="host")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_picture_net(tmp_path_factory.mktemp("model") / "net.onnx"))


def test_it_keeps_the_contract(modelled: Backend, model: Model) -> None:
    check_backend(modelled, model)


def test_what_it_cannot_run(modelled: Backend, model: Model) -> None:
    assert "convert it" in modelled.refuses(Model("net", "tflite", b""))
    damaged = Model("net", "onnx", model.content[: len(model.content) // 2], model.inputs)
    assert "not a valid ONNX file" in modelled.refuses(damaged)
    with pytest.raises(ModelError):
        modelled.compile(damaged, modelled.detect())


def test_it_pays_for_its_transfers(modelled: Backend, model: Model) -> None:
    """The copies are made: eight megabytes take longer than a kilobyte."""
    [device] = modelled.detect()
    received, sent = modelled.compile(model, [device]).time_transfers(device, [1 << 10, 8 << 20], 9)
    for seconds in (received, sent):
        small, large = np.median(seconds, axis=0)
        assert large > 10 * small


def reference(model: Model, frame: Array) -> Array:
    """Return what onnx's own reference computes."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    [expected] = ReferenceEvaluator(onnx.load_from_string(model.content)).run(None, {"picture": frame})
    return expected


@pytest.mark.thorough
@pytest.mark.usefixtures("beside_the_host")
def test_it_shares_a_model_with_the_host(model, tmp_path, caplog) -> None:
    """No platform file, and one plan over both, in which its upload and its download count.

    A new backend needs its own package only; nothing here names the example. Results are those of onnx's own reference.
    """
    with caplog.at_level(logging.WARNING):
        backend, detected = settle_platform(detect_platform(model))
    assert "left out" not in caplog.text
    assert {device.backend for device in detected.devices} == {"host", "modelled"}
    assert detected.stand_ins.keys() == {"accelerator"}
    cpu = next(device for device in detected.devices if device.backend == "host")
    platform = replace(detected, devices=(cpu, detected.device("accelerator")), links=())
    with closing(backend.compile(model, platform.devices)) as compiled:
        profile = profile_model(backend, compiled, platform, 4)
        assert (profile.devices[cpu.name].receive, profile.devices[cpu.name].send) == (None, None)
        measured = profile.devices["accelerator"]
        assert measured.receive is not None
        assert measured.send is not None
        for transfer in (measured.receive, measured.send):
            assert transfer.seconds(8 << 20) > 1e-5  # a copy of eight megabytes

        # The CPU has no memory for the whole model, so that the plan needs the accelerator.
        small = replace(platform, devices=(replace(cpu, memory_bytes=5000), platform.devices[1]))
        problem = Problem(compiled.graph, small, profile, objective="latency", stages=2, activations=False)
        chosen = planning.plan(problem).plan
        assert {name for stage in chosen.stages for name in stage.devices} == {cpu.name, "accelerator"}

        # The prediction is the operators, the link, and the upload and download of the accelerator's stage.
        predicted_s = 0.0
        boundaries = crossing_tensors(compiled.graph, [stage.operators for stage in chosen.stages])
        sizes = [sum(tensor.bytes for tensor in boundary) for boundary in boundaries]
        for stage, (received, sent) in zip(chosen.stages, pairwise(sizes), strict=True):
            [name] = stage.devices
            predicted_s += sum(profile.devices[name].seconds[operator] or 0.0 for operator in stage.operators)
            if name == "accelerator":
                predicted_s += measured.receive.seconds(received) + measured.send.seconds(sent)
        predicted_s += problem.link(chosen.stages[0].devices[0], chosen.stages[1].devices[0]).seconds(sizes[1])
        assert chosen.predicted.latency_s == pytest.approx(predicted_s)

        # Slower transfers make exactly the difference.
        slower = replace(measured, receive=replace(measured.receive, latency_s=measured.receive.latency_s + 0.25))
        priced = replace(profile, devices={**profile.devices, "accelerator": slower})
        after = evaluate(replace(problem, profile=priced), chosen.stages).predicted
        assert after.latency_s == pytest.approx(chosen.predicted.latency_s + 0.25)

        write_bundle(tmp_path / "net.tar", Bundle(compiled.graph, platform, profile, chosen, compiled))
        names = compiled.graph.operator_names
        thrice = make_plan(
            compiled.graph, ([cpu.name], names[:3]), (["accelerator"], names[3:6]), ([cpu.name], names[6:])
        )
        draw = np.random.default_rng(0)
        frames = [draw.standard_normal((1, 3, 32, 32)).astype(np.float32) for _ in range(4)]
        expected = [reference(model, frame) for frame in frames]
        with open_bundle(tmp_path / "net.tar") as opened:
            for made, plan in ((compiled, thrice), (opened.compiled, opened.plan)):
                with Pipeline(made, plan, platform) as pipeline:
                    for scores, result in zip(expected, pipeline.map(frames), strict=True):
                        np.testing.assert_allclose(result.outputs["scores"], scores, rtol=1e-4, atol=1e-5)
                    # No figure of the CPU that plays the device passes for one of a device.
                    assert "accelerator (stand-in)" in [stage.device for stage in pipeline.statistics().stages]


@pytest.mark.thorough
@pytest.mark.usefixtures("beside_the_host")
def test_the_commands_show_its_transfers_and_say_that_a_cpu_plays_it(monkeypatch, capfd, tmp_path) -> None:
    outcome = run_command(capfd, monkeypatch, "devices", "--json")
    [told] = [device["stand_in"] for device in outcome.json["devices"] if device["stand_in"]]
    assert told == "numpy on a thread of the CPU (an example, which has no hardware)"
    net = write_picture_net(tmp_path / "net.onnx")
    outcome = run_command(capfd, monkeypatch, "profile", net, "--repeats", 2, "--device", "cpu0,accelerator", "--json")
    assert outcome.code == 0, outcome.err
    assert f"not here: accelerator. Stages run on {told}" in outcome.err
    for direction in ("receive", "send"):
        assert outcome.json["devices"]["accelerator"][direction]["bandwidth_bytes_per_s"] > 1e6


def test_no_file_of_the_project_knows_the_example() -> None:
    for folder in ("tvm_pipeline", "backends"):
        for path in (EXAMPLE.parents[1] / folder).rglob("*.py"):
            assert "modelled_device" not in path.read_text(), path
