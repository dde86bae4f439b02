"""A backend that serves others: it compiles for their devices as well, and has the platform alone."""

from __future__ import annotations

import itertools
import logging

import pytest

from tests.support.fake_backend import chain_model, number
from tests.support.installed import install
from tests.support.log_lines import log_lines
from tvm_pipeline import Bundle, Pipeline, open_bundle, write_bundle
from tvm_pipeline.backends.registry import compose, detect_platform, find_backend, settle_platform
from tvm_pipeline.backends.sliced import SlicedBackend
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.errors import ModelError
from tvm_pipeline.testing import FakeBackend
from tvm_pipeline.workflow import steps as workflow

MODEL = Model("chain", "onnx", b"")


def made(name: str, *serves: str, cuts: tuple[str, ...] = ()) -> FakeBackend:
    devices = [Device(f"{name}0", name, target=f"{name}:0")]
    return FakeBackend(devices, [chain_model(2)], name=name, cuts=cuts, serves=serves)


def before(name: str) -> FakeBackend:
    """Return a plug-in that was written before backends could serve others."""
    backend = made(name)
    del backend.serves
    return backend


def found() -> list[str]:
    return [device.name for device in detect_platform(MODEL).devices]


def test_it_has_the_platform_alone(monkeypatch) -> None:
    for order in itertools.permutations([made("gpu", "host"), made("host"), before("old")]):
        install(monkeypatch, *order)
        for names in itertools.permutations(["gpu", "host", "gpu"]):
            assert compose(names) is find_backend("gpu")
        assert compose(["host"]) is find_backend("host")
        assert isinstance(compose(["gpu", "old"]), SlicedBackend)
        assert sorted(compose(["gpu", "host", "old"]).backends) == ["gpu", "host", "old"]  # type: ignore[attr-defined]


def test_it_serves_all_the_others_or_none(monkeypatch) -> None:
    install(monkeypatch, made("gpu", "host", "npu"), made("host"), made("npu", "host"))
    assert compose(["gpu", "host", "npu"]) is find_backend("gpu")
    assert compose(["host", "npu"]) is find_backend("npu")


def test_of_two_that_serve_each_other_one_rule_decides(monkeypatch) -> None:
    install(monkeypatch, made("b", "a"), made("a", "b"))
    assert compose(["b", "a"]) is find_backend("a")
    install(monkeypatch, made("b", "a"), made("a", "b"), own="b")
    assert compose(["a", "b"]) is find_backend("b")


def test_detected_devices_of_both_stay_together(monkeypatch, caplog) -> None:
    for order in itertools.permutations([made("gpu", "host"), made("host")]):
        install(monkeypatch, *order)
        assert found() == ["gpu0", "host0"]
        backend, settled = settle_platform(detect_platform(MODEL))
        assert backend is find_backend("gpu")
        assert backend.compile(MODEL, settled.devices).graph.name == "chain"
    assert caplog.text == ""


@pytest.mark.parametrize("stranger", [made("another"), before("another"), made("zebra"), before("zebra")])
def test_a_stranger_is_left_out_as_before(monkeypatch, caplog, stranger: FakeBackend) -> None:
    for order in itertools.permutations([made("gpu", "host"), made("host"), stranger]):
        install(monkeypatch, *order, own="host")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert found() == ["gpu0", "host0"]
        assert f"{stranger.name}0 of {stranger.name} left out of chain: none of the backends" in caplog.text
        assert "host is taken, since it comes with tvm-pipeline, with gpu; for another choice" in caplog.text


def test_with_one_that_cuts_the_file_all_share_the_model(monkeypatch, caplog) -> None:
    install(monkeypatch, made("edgetpu", cuts=("onnx",)), made("gpu", "host"), made("host"))
    assert found() == ["edgetpu0", "gpu0", "host0"]
    backend, _ = settle_platform(detect_platform(MODEL))
    assert backend.name == "edgetpu+gpu+host"
    assert caplog.text == ""


def test_a_bundle_of_both(monkeypatch, tmp_path) -> None:
    install(monkeypatch, made("gpu", "host"), made("host"))
    backend, platform = settle_platform(detect_platform(MODEL))
    model = backend.compile(MODEL, platform.devices)
    stages = tuple(Stage((device.name,), (f"op{i}",)) for i, device in enumerate(platform.devices))
    plan = Plan("chain", "by hand", "throughput", stages, Prediction(1.0, 1.0))
    write_bundle(tmp_path / "net.tar", Bundle(model.graph, platform, unmeasured(model.graph), plan, model))
    with (
        open_bundle(tmp_path / "net.tar") as bundle,
        Pipeline(bundle.compiled, bundle.plan, bundle.platform) as pipeline,
    ):
        [result] = pipeline.map([{"x": number(5)}])
        assert result.outputs["y"].tolist() == [7]


class Refusing(FakeBackend):
    """Compiles for the devices of others, and for none of its own."""

    def compile(self, model, devices, order="listed"):
        if any(device.backend == self.name for device in devices):
            raise ModelError("its kernels do not line up")
        return super().compile(model, devices, order)


def test_detected_devices_that_cannot_be_compiled_for_are_left_out(monkeypatch, tmp_path) -> None:
    gpu = Refusing([Device("gpu0", "gpu")], [chain_model(2)], name="gpu", serves=("host",))
    install(monkeypatch, gpu, made("host"))
    monkeypatch.setattr(workflow, "load", lambda *_: MODEL)
    warned = log_lines("WARNING")
    compiled = workflow.compile_source("chain.onnx")
    assert compiled.backend is find_backend("host")
    assert [device.name for device in compiled.platform.devices] == ["host0"]
    assert warned == ["gpu0 left out of chain: its kernels do not line up"]
    # A platform file asks for them.
    (tmp_path / "both.toml").write_text(
        'name = "both"\n[[device]]\nname = "gpu0"\nbackend = "gpu"\n[[device]]\nname = "host0"\nbackend = "host"\n'
    )
    with pytest.raises(ModelError, match="do not line up"):
        workflow.compile_source("chain.onnx", platform=tmp_path / "both.toml")
