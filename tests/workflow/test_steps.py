"""The steps from a file to a plan, as programs call them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.support.log_lines import log_lines
from tvm_pipeline import open_bundle, write_bundle
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import checked_objective
from tvm_pipeline.errors import OptionError, PlatformError
from tvm_pipeline.testing import example_backend, installed
from tvm_pipeline.workflow.doubts import stand_in_warnings
from tvm_pipeline.workflow.steps import (
    compile_source,
    decide,
    measured_profile,
    opened_bundle,
    planned,
)

PROFILES = Path(__file__).parents[2] / "profiles"
GRAPH, USB = PROFILES / "keras" / "MobileNetV2.json", PROFILES / "platforms" / "coral-usb-2.toml"


def test_a_graph_is_planned_without_running_anything():
    with planned(str(GRAPH), platform=USB) as subject:
        assert subject.compiled is None
        problem = subject.problem(stages=2)
        heard = log_lines("INFO")
        decision, profile = decide(problem)
    assert len(decision.plan.stages) == 2
    assert profile == subject.profile
    assert heard == ["simulating the best plans, with turns on the bus"]


def test_stages_of_a_graph_alone_cannot_be_measured():
    with planned(str(GRAPH), platform=USB) as subject, pytest.raises(OptionError, match="give a model") as caught:
        decide(subject.problem(), "measured")
    assert (caught.value.option, caught.value.value) == ("scheduler", "measured")


def test_a_model_is_compiled_and_measured(model):
    heard = log_lines("INFO")
    warned = log_lines("WARNING")
    made = compile_source(model)
    profile = measured_profile(made, repeats=2)
    profile.check_graph(made.compiled.graph)
    assert heard
    assert warned == [*stand_in_warnings(made.platform), *profile.warnings]


def test_a_backend_that_stores_weights_in_float32_refuses_others_before_it_compiles(tmp_path, monkeypatch):
    file, backend, net = tmp_path / "box.toml", example_backend(), Model("net", "onnx", b"")
    file.write_text('name = "box"\n[[device]]\nname = "d0"\nbackend = "fake"\n')
    with installed(backend):
        made = compile_source(net, platform=file, weights="float32")
        monkeypatch.setattr(type(backend), "compile", lambda *_: pytest.fail("it compiles"))
        with pytest.raises(PlatformError, match=r"^`weights` bfloat16: .* fake stores weights in float32 alone"):
            compile_source(net, platform=file, weights="bfloat16")
        with pytest.raises(PlatformError, match="d0, d1 left out: the backend fake stores weights in float32 alone"):
            compile_source(replace(net, weights="float16"))
        with pytest.raises(OptionError, match="`weights` half: weights are stored as float32, or in half") as caught:
            compile_source(net, weights="half")
    assert made.compiled.stored_weights() == []
    assert (caught.value.option, caught.value.value) == ("weights", "half")


def test_devices_with_the_same_stand_in_share_a_warning():
    devices = tuple(Device(f"tpu{i}", target=f"usb:{i}", stand_in=f"a CPU for usb:{i}") for i in range(2))
    platform = Platform("desk", (*devices, Device("cpu0")))
    assert stand_in_warnings(platform) == ["not here: tpu0, tpu1. Stages run on a CPU for usb:0"]


def test_an_objective_that_is_none():
    assert checked_objective("latency") == "latency"
    with pytest.raises(OptionError, match="there is no `objective` 'beauty'; there are throughput") as caught:
        checked_objective("beauty")
    assert caught.value.option == "objective"


def test_a_profile_of_another_processor_is_used_with_a_warning(bundle, model, tmp_path):
    with open_bundle(bundle) as opened:
        here = opened.profile.environment["processor"]
        profile = replace(opened.profile, environment={**opened.profile.environment, "processor": "Quantum 9000"})
        write_bundle(tmp_path / "net.tar", replace(opened, profile=profile))
        (tmp_path / "here.json").write_bytes(msgspec.json.encode(opened.profile))
        (tmp_path / "there.json").write_bytes(msgspec.json.encode(profile))

    def said(source, profile=None):
        warned = log_lines("WARNING")
        with planned(str(source), profile=profile and tmp_path / profile):
            pass
        return [line for line in warned if "was measured on" in line]

    words = f"was measured on Quantum 9000, and here is {here}: predictions may be far off. Profile again with"
    for source, file in ((tmp_path / "net.tar", None), (bundle, "there.json"), (model, "there.json")):
        [line] = said(source, file)
        assert line.startswith(f"the profile of {tmp_path / file if file else source} {words}")
    assert said(bundle) == said(tmp_path / "net.tar", "here.json") == said(model, "here.json") == []
    warned = log_lines("WARNING")
    with opened_bundle(tmp_path / "net.tar"):
        assert [line for line in warned if words in line]
