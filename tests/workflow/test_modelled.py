"""Plans from calibrated models: what is not measured then, what is, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.calibration.test_measuring import Backend
from tests.profiling.test_layer_times import lawful, network, several
from tests.support.log_lines import log_lines
from tvm_pipeline import Device, Platform
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.platform_text import platform_toml
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.errors import PlatformError
from tvm_pipeline.testing import FakeModel, installed
from tvm_pipeline.workflow.steps import planned

ROOFLINE = DeviceModel(1e10, operator_s=1e-6, bytes_per_s=1e10, error=0.08)
HERE = Device("cpu0", cores=(0,), model=ROOFLINE)
ELSEWHERE = Device("big", cores=(4095,), model=replace(ROOFLINE, error=0.2))


@pytest.fixture
def file(tmp_path):
    """Write a platform file of these devices."""

    def write(*devices: Device) -> Path:
        path = tmp_path / "box.toml"
        path.write_text(platform_toml(Platform("box", devices)))
        return path

    return write


@pytest.fixture
def graph(tmp_path) -> Path:
    (tmp_path / "asked.json").write_bytes(msgspec.json.encode(network("asked", np.random.default_rng(9))))
    return tmp_path / "asked.json"


def test_a_graph_is_planned_from_models_and_says_so(cli, graph, file):
    outcome = cli("plan", graph, "--platform", file(HERE, ELSEWHERE), "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["modelled"] == {"cpu0": 0.08, "big": 0.2}
    assert "modelled, not measured (cpu0: calibrated with error 8%; big: calibrated with error 20%" in outcome.err
    single = next(plan for plan in outcome.json["candidates"] if [s["devices"] for s in plan["stages"]] == [["cpu0"]])
    assert single["predicted"]["uncertainty"] == pytest.approx(0.08 * 2.4565, rel=1e-3)


def test_a_model_is_compiled_and_not_measured(model, file):
    heard = log_lines("INFO")
    with planned(str(model), platform=file(HERE), from_models=True) as subject:
        assert not subject.profile.devices
        assert subject.compiled is not None
        assert not subject.not_here
        assert subject.problem().platform.devices[0].model == ROOFLINE
    assert not [line for line in heard if line.startswith("operators on")]


def test_others_of_the_platform_are_measured(model, file):
    both = file(HERE, Device("same", cores=(0,)))
    with planned(str(model), platform=both, from_models=True) as subject:
        assert set(subject.profile.devices) == {"same"}
    with planned(str(model), platform=file(HERE)) as subject:  # as `bench` and `deploy` ask
        assert set(subject.profile.devices) == {"cpu0"}


def test_a_profile_wins(cli, graph, file, tmp_path):
    asked = network("asked", np.random.default_rng(9))
    measured = Profile(asked.name, asked.fingerprint, {"cpu0": lawful(asked)})
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(measured))
    outcome = cli("plan", graph, "--platform", file(HERE), "--profile", tmp_path / "profile.json", "--json")
    assert outcome.json["modelled"] == {}
    assert "modelled" not in outcome.err
    assert 1 / outcome.json["predicted"]["throughput_fps"] == pytest.approx(lawful(asked).whole_s, rel=1e-3)


def test_a_platform_that_is_not_here_needs_no_device(model, file):
    """All its devices are modelled, so the model is compiled for this machine, for its operators alone."""
    away = file(HERE, ELSEWHERE)
    heard = log_lines("INFO")
    with planned(str(model), platform=away, from_models=True) as subject:
        assert subject.compiled is None
        assert "4095" in subject.not_here
        assert [device.name for device in subject.platform.devices] == ["cpu0", "big"]
    assert heard[0].startswith(f"compiling {model} here for its operators alone")
    with (
        pytest.raises(PlatformError, match="4095"),
        planned(str(model), platform=file(HERE, replace(ELSEWHERE, model=None)), from_models=True),
    ):
        pass


def test_plans_are_not_tried_out_on_a_stand_in(file, tmp_path):
    """The figures are the device's, and what runs here is another processor."""
    (tmp_path / "net0.relay").write_text("its graph is known")
    [graph] = several(1)
    absent = Device("absent", "fake", model=ROOFLINE)
    with installed(Backend([absent], [FakeModel(graph, {})])):
        source = str(tmp_path / "net0.relay")
        with planned(source, platform=file(absent), from_models=True) as subject:
            assert subject.not_here.startswith("absent not here: figures are modelled")
            assert subject.compiled is None
            assert not subject.profile.devices
