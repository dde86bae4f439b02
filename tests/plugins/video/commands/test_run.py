"""`run` as a user meets it: a video and lines come out, and whatever is wrong leaves nothing half written."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.cli.test_bad_input import fails
from tvm_pipeline import Stage
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.report.tables import fps
from tvm_pipeline.runtime.live_pipeline import LivePipeline


def test_run_writes_a_video_and_a_line_for_each_frame(cli, bundle, tmp_path):
    import av

    video, lines = tmp_path / "out.mp4", tmp_path / "out.jsonl"
    outcome = cli("run", bundle, "--source", "synthetic:64x48@30:12", "--output", video, "--results", lines)
    assert outcome.code == 0, outcome.err
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["frame"] for row in rows] == list(range(12))
    with av.open(str(video)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 12


@pytest.mark.thorough
def test_a_report_has_the_measured_figures_and_an_overlay_changes_pixels(cli, bundle, tmp_path):
    import av

    folder, pictures = tmp_path / "out", []
    for name, *options in (("plain",), ("figures", "--overlay", "--report", folder, "--json")):
        video = tmp_path / f"{name}.mkv"
        outcome = cli(
            "run", bundle, "--source", "synthetic:160x96@30:30", "--output", video, "--adapt", "off", *options
        )
        assert outcome.code == 0, outcome.err
        with av.open(str(video)) as container:
            pictures.append([frame.to_ndarray(format="gray") for frame in container.decode(video=0)][-1].astype(int))
    difference = np.abs(pictures[0] - pictures[1])
    assert difference[-14:, :40].max() > 50  # text at the bottom left, and nothing elsewhere
    assert difference[:48].max() < 20
    report = (folder / "report.md").read_text()
    assert f"at **{fps(outcome.json['measured']['throughput_fps'])} frames a second**" in report
    assert {path.name for path in folder.iterdir()} == {"report.md", "frame.png", "gantt.png", "graph.png"}
    plan = tmp_path / "plan.txt"
    plan.write_text(next(block for block in report.split("```\n") if block.startswith("plan ")))
    arguments = "--source", "synthetic:160x96@30:30", "--output", tmp_path / "again.mkv", "--plan", plan, "--json"
    assert cli("run", bundle, *arguments).json["stages"] == outcome.json["stages"]


@pytest.mark.needs("two cores")
def test_a_run_that_changed_its_plan_is_reported(cli, bundle, tmp_path, monkeypatch):
    """The plan that it ends by is one that was not measured when the first plan was chosen."""

    def start_and_switch(live):
        start(live)
        first, *others = (name for stage in live.plan.stages for name in stage.operators)
        stages = Stage(("cpu0",), (first,)), Stage(("cpu1",), tuple(others))
        assert live.switch(judged(live.given, replace(live.plan, stages=stages)), "a test asked for it")

    start = LivePipeline.start
    monkeypatch.setattr(LivePipeline, "start", start_and_switch)
    options = "--output", tmp_path / "out.mkv", "--adapt", "off", "--report", tmp_path / "out"
    outcome = cli("run", bundle, "--source", "synthetic:64x48@30:12", *options)
    assert outcome.code == 0, outcome.err
    report = (tmp_path / "out" / "report.md").read_text()
    assert "a test asked for it" in report
    [chosen] = [line for line in report.splitlines() if line.startswith("|") and "chosen**" in line]
    assert r"(cpu0 \| cpu1)" in chosen


@pytest.mark.thorough
def test_run_gives_the_model_s_own_outputs(cli, bundle, tmp_path):
    """The highest score of each line is that of the whole model run frame by frame."""
    from tvm_pipeline import open_bundle
    from tvm_pipeline_video import open_source, preprocess, preprocessing_for

    lines = tmp_path / "out.jsonl"
    assert cli("run", bundle, "--source", "synthetic:64x48@30:6", "--results", lines).code == 0
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    with open_bundle(bundle) as opened, open_source("synthetic:64x48@30:6") as source:
        settings = preprocessing_for(opened.graph)
        whole = opened.compiled.stage(opened.graph.operator_names, opened.platform.devices[0])
        inputs, outputs = [p.buffer() for p in whole.inputs], [p.buffer() for p in whole.outputs]
        for row, frame in zip(rows, source, strict=True):
            preprocess(frame.image, settings, inputs[0])
            whole.run(inputs, outputs)
            (described,) = row["outputs"].values()
            assert described["max"] == float(outputs[0].max())


def test_run_with_a_decoder_from_a_file(cli, bundle, tmp_path):
    decoder = tmp_path / "decoder.py"
    decoder.write_text(
        "from tvm_pipeline_video import Annotation\n"
        "def decode(outputs, transform):\n"
        "    return [Annotation('seen', 1.0, (*transform.to_image(0, 0), *transform.to_image(16, 16)))]\n"
    )
    lines = tmp_path / "out.jsonl"
    arguments = ["--source", "synthetic:64x48@30:3", "--decoder", f"{decoder}:decode", "--results", lines]
    assert cli("run", bundle, *arguments).code == 0
    first = json.loads(lines.read_text().splitlines()[0])
    assert np.allclose(first["annotations"][0]["box"], [0, 0, 32, 24])


@pytest.mark.thorough
def test_preprocessing_beside_the_model_goes_into_the_bundle(cli, model, tmp_path):
    from tvm_pipeline import open_bundle

    (tmp_path / "net.onnx").write_bytes(model.read_bytes())
    (tmp_path / "net.toml").write_text('size = [32, 32]\nfit = "letterbox"\nscale = 1.0\n')
    assert cli("compile", tmp_path / "net.onnx", "-o", tmp_path / "net.tar", "--scheduler", "single").code == 0
    with open_bundle(tmp_path / "net.tar") as opened:
        assert opened.preprocessing["fit"] == "letterbox"


def test_empty_and_broken_videos_leave_no_output(cli, bundle, tmp_path):
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "noise.mp4").write_bytes(bytes(range(256)) * 40)
    for name in ("empty.mp4", "noise.mp4", "absent.mp4"):
        fails(cli("run", bundle, "--source", tmp_path / name, "--output", tmp_path / "out.mp4"), name)
    assert not (tmp_path / "out.mp4").exists()


@pytest.mark.thorough
def test_a_stream_that_ends_midway_keeps_what_came_before(cli, bundle, tmp_path):
    whole = tmp_path / "whole.mp4"
    assert cli("run", bundle, "--source", "synthetic:64x48@30:60", "--output", whole).code == 0
    cut = tmp_path / "cut.mp4"
    content = whole.read_bytes()
    # The index of an mp4 stands at one end; cut the pictures, wherever they are, and keep the index readable.
    start = content.index(b"mdat")
    cut.write_bytes(content[: start + 4] + content[start + 4 :][: (len(content) - start) // 3])
    outcome = cli("run", bundle, "--source", cut, "--results", tmp_path / "out.jsonl")
    assert outcome.code == 1
    assert "cut.mp4" in outcome.err


@pytest.mark.thorough
def test_a_full_disk_is_told(cli, bundle):
    outcome = cli("run", bundle, "--source", "synthetic:64x48@30:3", "--results", "/dev/full")
    assert (outcome.code, "error: cannot write /dev/full: No space left" in outcome.err) == (1, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--limit", str(2**63)), ["--limit", "no source"]),
        (("--policy", f"every={'9' * 5000}"), ["--policy"]),
    ],
)
def test_what_cannot_be_is_said_before_the_bundle_is_read(cli, options, words):
    """The bundle is not there, and the error is not that."""
    outcome = cli("run", "no.tar", "--source", "synthetic:32x32", *options)
    assert outcome.code in (1, 2)
    assert all(word in outcome.err for word in words)
