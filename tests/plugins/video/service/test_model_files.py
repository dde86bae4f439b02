"""From a model file to boxes by one command: compiled once, its decoder recognised, all that is assumed said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.log_lines import log_lines
from tests.support.tiny_yolo import FOUND, write_tiny_yolo
from tvm_pipeline import planning, write_bundle
from tvm_pipeline.cli import compile as cli_compile
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.errors import OptionError, PipelineError
from tvm_pipeline.workflow.machine import HERE
from tvm_pipeline.workflow.steps import opened_bundle
from tvm_pipeline_video.decoders import Request
from tvm_pipeline_video.decoders.labels import COCO
from tvm_pipeline_video.service import host_planning, model_bundle
from tvm_pipeline_video.service.file import SettingsReader
from tvm_pipeline_video.service.listener import Listener
from tvm_pipeline_video.service.model_bundle import opened_model
from tvm_pipeline_video.service.settings import Settings

FILM = "synthetic:128x96@30:5"
LABELS = ("cat", "dog")


class Heard(Listener):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def warn(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory, empty_cache) -> tuple[Path, Path, list[str], list[str]]:
    """Give a model file, its bundle in a shared cache, and what was said and doubted when it was compiled."""
    folder = tmp_path_factory.mktemp("models")
    path, heard, warned = write_tiny_yolo(folder / "tiny.onnx"), Heard(), log_lines("WARNING")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_PIPELINE_CACHE", str(empty_cache(folder / "cache")))
        with opened_model(path, Settings(), heard) as (kept, bundle):
            assert bundle.metadata["task"] == "detect"
    return path, kept, heard.lines, warned.copy()


@pytest.fixture
def net(compiled, monkeypatch):
    path, kept, *_ = compiled
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(kept.parents[1]))
    return path


def boxes(labels=LABELS) -> list[dict]:
    """Return what is found in a picture of 128 x 96, which fills the width of the input at half its size."""
    found = []
    for (x, y, width, height), kind, score in FOUND:
        left, top, right, bottom = x - width / 2, y - height / 2, x + width / 2, y + height / 2
        box = [left * 2, (top - 8) * 2, right * 2, (bottom - 8) * 2]
        found.append({"label": labels[kind], "score": pytest.approx(score), "box": pytest.approx(box)})
    return found


def found_in(line: str) -> list[dict]:
    return [{key: one[key] for key in ("label", "score", "box")} for one in json.loads(line)["annotations"]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(source=["missing.mp4"]), "there is no file or folder missing.mp4"),
        (Settings(source=["rtsp://me:word@127.0.0.1:9/x"]), r"me:\*\*\*@127.* cannot be reached: Connection refused"),
        (Settings(source=[FILM], decoder=["yollo"]), "did you mean yolo"),
        (Settings(source=[FILM], decoder=["ssd"]), "ssd cannot read the outputs output0"),
        (Settings(source=[FILM], labels=["coco"]), "there are 80, and the model has 2 classes"),
        (Settings(source=[FILM], classes=["persn"]), "no class of this name"),
        (Settings(source=[FILM], threshold=[3.0]), "must be above 0 and below 1"),
        (Settings(source=[FILM], preprocessing="yollo"), "no such preset"),
    ],
)
def test_a_wrong_name_is_told_before_the_model_is_compiled(settings, words, tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(tmp_path))
    heard, net = Heard(), write_tiny_yolo(tmp_path / "n.onnx")
    settings = replace(settings, bundle=[net])
    with pytest.raises(PipelineError, match=words), opened_model(net, settings, heard):
        pass
    assert heard.lines == []


def test_a_model_file_is_compiled_once_and_what_is_assumed_is_said(compiled, net):
    _, kept, lines, warned = compiled
    assert lines[0].startswith(f"{net} is compiled for this machine, once")
    assert lines[-1] == f"kept for the next run: {kept}"
    note = "images:[1,3,64,64] by the file's metadata (imgsz), which leaves it open; `input_shapes` gives another"
    assert warned.count(f"tiny: {note}") == 1
    heard = Heard()
    with opened_model(net, Settings(), heard) as (again, _):
        assert again == kept
    said = [line for line in heard.lines if not line.startswith("when ")]  # what disturbed the profile is repeated
    assert [line for line in said if "profile" not in line] == [note, f"{net} was compiled before ({kept})"]


def test_what_makes_a_kept_profile_doubtful_is_repeated(compiled, net):
    _, kept, *_ = compiled
    with opened_bundle(kept) as bundle:
        doubtful = replace(bundle, profile=replace(bundle.profile, warnings=("device cpu0 was disturbed",)))
        write_bundle(kept.with_name("doubtful.tar"), doubtful)
    heard = Heard()
    with opened_model(kept.with_name("doubtful.tar"), Settings(), heard):
        pass
    assert any("device cpu0 was disturbed" in line for line in heard.lines)
    before = kept.read_bytes()
    kept.with_name("doubtful.tar").rename(kept)
    heard = Heard()
    with opened_model(net, Settings(), heard):
        pass
    assert f"when {net} was compiled, device cpu0 was disturbed. `fresh` measures again" in heard.lines
    kept.write_bytes(before)


@pytest.mark.thorough
def test_one_command_from_a_model_file_to_boxes(cli, net, tmp_path):
    lines = tmp_path / "found.jsonl"
    first = cli("run", net, "--source", FILM, "--results", lines, "--output", tmp_path / "out.mp4", "--adapt", "off")
    assert first.code == 0, first.err
    for words in (
        "preprocessing: 64x64 letterbox, rgb, 0..1: as yolov8 takes it by the model's metadata, the preset yolo",
        "decoder: yolov8: ",
        "[1, 6, 84], 2 classes, recognised from its outputs and its metadata",
    ):
        assert words in first.err
    assert [found_in(line) for line in lines.read_text().splitlines()] == [boxes()] * 5
    assert (tmp_path / "out.mp4").stat().st_size > 0


@pytest.mark.thorough
def test_a_bundle_that_is_damaged_is_made_again(compiled, net):
    _, kept, *_ = compiled
    kept.write_bytes(b"damaged")
    heard = Heard()
    with opened_model(net, Settings(), heard) as (again, bundle):
        assert (again, bundle.metadata["task"]) == (kept, "detect")
    assert heard.lines[0].startswith(f"{net} is compiled anew: {kept}: ")


def test_a_service_reads_labels_and_preprocessing_beside_its_file(tmp_path):
    (tmp_path / "names.txt").write_text("lynx\nwolf\n")
    (tmp_path / "net.toml").write_text('preset = "yolo"\n')
    text = f'bundle = "net.onnx"\nsource = "{FILM}"\nclasses = "wolf, lynx"\nthreshold = 0.5\n'
    for labels, preprocessing, given in (
        ("names.txt", "net.toml", (("lynx", "wolf"), str(tmp_path / "net.toml"))),
        ("coco", "yolo", (COCO, "yolo")),
    ):
        file = tmp_path / "service.toml"
        file.write_text(f'{text}labels = "{labels}"\npreprocessing = "{preprocessing}"\n')
        settings = SettingsReader(file).read()
        assert settings.request(0) == Request("", given[0], 0.5, ("wolf", "lynx"))
        assert settings.preprocessing == given[1]


@pytest.mark.thorough
def test_the_decoder_of_an_application_is_that_of_its_bundle(cli, net, tmp_path):
    app, lines = tmp_path / "app.tar", tmp_path / "found.jsonl"
    options = ("--decoder", "yolo", "--classes", "dog", "--verify", 0)
    compiled = cli("compile", net, "-o", app, "--source", FILM, *options)
    assert compiled.code == 0, compiled.err
    assert "decoder: yolov8: " in compiled.err
    outcome = cli("run", app, "--source", FILM, "--results", lines, "--adapt", "off")
    assert outcome.code == 0, outcome.err
    assert "another application" not in outcome.err
    assert [found_in(line) for line in lines.read_text().splitlines()] == [boxes()[1:]] * 5


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--decoder", "yolov9"), "--decoder 'yolov9': did you mean yolov8"),
        (("--decoder", "text"), "--decoder text cannot read the outputs"),
        (("--labels", "none.txt"), "none.txt"),
        (("--classes", "lion"), "--classes lion: the model has no class of this name; such as cat, dog"),
        (("--threshold", "1.5"), "--threshold 1.5: it must be above 0 and below 1"),
        (("--preprocessing", "imagnet"), "--preprocessing imagnet: there is no such file, and no such preset"),
    ],
)
def test_options_that_do_not_fit_are_named(cli, net, options, words):
    outcome = cli("run", net, "--source", FILM, *options)
    assert outcome.code == 2
    assert words in outcome.err


def test_shapes_are_for_model_files_and_decoders_for_sources(cli, bundle, model, tmp_path):
    outcome = cli("run", bundle, "--source", FILM, "--input-shapes", "picture:[1,3,32,32]")
    assert f"--input-shapes: {bundle} is a bundle, which has its own" in outcome.err
    refused = cli("compile", model, "-o", tmp_path / "app.tar", "--threshold", 0.5)
    assert "--threshold goes with --source" in refused.err


def test_options_of_several_models():
    two = {"bundle": ["a.tar", "b.tar"], "source": ["synthetic", "synthetic:64x48"]}
    settings = Settings(**two, decoder=["yolo", "face"], threshold=[0.3], classes=["cat,dog", "face"])
    assert [settings.request(index).classes for index in (0, 1)] == [("cat", "dog"), ("face",)]
    assert [settings.request(index).threshold for index in (0, 1)] == [0.3, 0.3]
    one = Settings(bundle=["a.tar"], source=["synthetic"], classes=["cat, dog", "bird"])
    assert one.request(0).classes == ("cat", "dog", "bird")
    with pytest.raises(OptionError, match="`threshold` is given 3 times for 2 models"):
        Settings(**two, threshold=[0.1, 0.2, 0.3]).check()


@pytest.mark.thorough
def test_a_model_file_is_planned_once_with_the_work_around_it_as_compile_and_run_plan_it(
    cli, net, tmp_path, monkeypatch
):
    plans = []

    def counted(problem, *arguments, **options):
        plans.append(problem)
        return find_plan(problem, *arguments, **options)

    def figures(graph, platform):
        """Return a profile that is the same at each measurement: the second device is slower, by operator."""
        devices = {
            device.name: DeviceProfile.in_order(
                graph, [1e-3 * (1 + place * (index % 3)) for index in range(len(graph))]
            )
            for place, device in enumerate(platform.devices)
        }
        return Profile(graph.name, graph.fingerprint, devices)

    find_plan = planning.plan
    for module in (planning, host_planning):
        monkeypatch.setattr(module, "plan", counted)
    for module in (model_bundle, cli_compile):
        monkeypatch.setattr(
            module, "measured_profile", lambda made, *_, **__: figures(made.compiled.graph, made.platform)
        )
    monkeypatch.setattr(
        host_planning, "profile_host", lambda rehearsal, _, platform, __: figures(rehearsal.graph, platform)
    )
    monkeypatch.setattr(type(HERE), "stage_timer", lambda *_: None)  # it would measure stages as wholes

    def plan_of(path, *options):
        outcome = cli("run", path, "--source", FILM, "--adapt", "off", "--json", *options)
        assert outcome.code == 0, outcome.err
        return {key: outcome.json[key] for key in ("scheduler", "stages", "predicted", "bound")}

    found = plan_of(net, "--fresh")
    (planned,) = plans
    assert [operator.name for operator in planned.graph.operators if operator.is_host]
    assert plan_of(net) == found
    assert len(plans) == 1  # it was kept
    bundle = tmp_path / "tiny.tar"
    assert cli("compile", net, "-o", bundle, "--verify", 0).code == 0
    assert plan_of(bundle) == found


def test_a_cache_that_is_full_costs_only_the_next_run(net, cli, monkeypatch, tmp_path, empty_cache):
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(cache := empty_cache(tmp_path / "cache")))

    def written(path, bundle):
        if path.is_relative_to(cache):
            raise PipelineError(f"cannot write {path}: No space left on device; choose another place")
        write_bundle(path, bundle)

    monkeypatch.setattr(model_bundle, "write_bundle", written)
    outcome = cli("run", net, "--source", FILM, "--json")
    assert (outcome.code, outcome.json["measured"]["frames"]) == (0, 5), outcome.err
    assert "it is not kept for the next run: cannot write" in outcome.err
    assert list(cache.rglob("*.tar")) == []
