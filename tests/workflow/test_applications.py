"""Host work around a model comes from a plug-in. The one of these tests takes frames from nowhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tvm_pipeline import Bundle, OperatorGraph, Profile, open_bundle
from tvm_pipeline.errors import OptionError
from tvm_pipeline.runtime.comparison import Run, runner
from tvm_pipeline.workflow import applications
from tvm_pipeline.workflow.applications import MeasuredApplication
from tvm_pipeline.workflow.steps import Compiled


class Nowhere:
    """An application whose only work is the model's."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.preprocessing = {"fit": "stretch"}
        self.said = ("frames come from nowhere",)

    def measure(self, made: Compiled, profile: Profile) -> MeasuredApplication:
        run = runner(made.compiled, made.platform)
        return MeasuredApplication(made.compiled.graph, profile, run, {"source": self.source})


class Plugin:
    """The functions of `Applications`, and the sources that `again` was asked for."""

    def __init__(self) -> None:
        self.sources: list[str] = []

    def read(self, graph: OperatorGraph, metadata: Mapping[str, str], options: Mapping[str, Any]) -> Nowhere:
        if options["decoder"]:
            raise OptionError(f"`decoder` {options['decoder']}: there is nothing to decode", option="decoder")
        return Nowhere(options["source"])

    def again(self, bundle: Bundle, source: str) -> Run:
        self.sources.append(source or bundle.application["source"])
        return runner(bundle.compiled, bundle.platform)

    def seen(self) -> Iterator[str]:
        yield "nowhere: it is here"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Plugin:
    found = Plugin()
    monkeypatch.setattr(applications, "entry_points", lambda group: [SimpleNamespace(load=lambda: found)])
    return found


def test_a_bundle_keeps_the_record_of_its_application(cli, model, plugin, tmp_path):
    app = tmp_path / "app.tar"
    outcome = cli("compile", model, "-o", app, "--source", "nowhere", "--verify", 0)
    assert outcome.code == 0, outcome.err
    assert "frames come from nowhere" in outcome.err
    with open_bundle(app) as bundle:
        assert bundle.application == {"source": "nowhere"}
        assert bundle.preprocessing is None
    for source in ((), ("--source", "elsewhere")):
        outcome = cli("bench", app, *source, "--seconds", 0.05, "--rounds", 1)
        assert outcome.code == 0, outcome.err
    assert plugin.sources == ["nowhere", "elsewhere"]


def test_settings_beside_the_model_are_read_by_the_plug_in(cli, model, plugin, tmp_path):
    (tmp_path / "net.onnx").write_bytes(model.read_bytes())
    (tmp_path / "net.toml").write_text("")
    assert cli("compile", tmp_path / "net.onnx", "-o", tmp_path / "net.tar", "--verify", 0).code == 0
    with open_bundle(tmp_path / "net.tar") as bundle:
        assert bundle.preprocessing == {"fit": "stretch"}
        assert bundle.application is None


def test_a_wrong_option_is_told_by_the_plug_in(cli, model, plugin, tmp_path):
    outcome = cli("compile", model, "-o", tmp_path / "net.tar", "--source", "nowhere", "--decoder", "yolo")
    assert (outcome.code, "--decoder yolo: there is nothing to decode" in outcome.err) == (2, True)


def test_devices_lists_what_the_plug_in_sees(cli, plugin):
    assert "nowhere: it is here" in cli("devices").err


@pytest.mark.parametrize("option", ["source", "preprocessing"])
def test_without_a_plug_in_the_option_says_what_is_missing(cli, model, monkeypatch, tmp_path, option):
    monkeypatch.setattr(applications, "entry_points", lambda group: ())
    outcome = cli("compile", model, "-o", tmp_path / "net.tar", f"--{option}", "nowhere")
    assert outcome.code == 2
    assert f"--{option} is of applications, and no plug-in for them is installed" in outcome.err
    assert cli("devices").code == 0
