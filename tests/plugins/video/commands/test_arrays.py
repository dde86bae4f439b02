"""`run --inputs x.npz --outputs y.npz`: the outputs are those of the model in onnxruntime, and bad files are named."""

from __future__ import annotations

import os

import numpy as np
import onnxruntime
import pytest

from tests.support.crashes import children_of
from tests.support.tiny_yolo import write_tiny_yolo
from tvm_pipeline import Pipeline
from tvm_pipeline_video.commands import arrays

SHAPE = (1, 3, 64, 64)


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    return write_tiny_yolo(tmp_path_factory.mktemp("arrays") / "tiny.onnx")


def expected(net, frame):
    """The outputs of onnxruntime for one frame."""
    session = onnxruntime.InferenceSession(str(net), providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: frame})
    return output


@pytest.mark.parametrize("given", [("--results", "found.jsonl"), ("--watchdog", 5), ("--config", "service.toml")])
def test_an_option_that_does_nothing_is_refused(cli, net, given):
    told = cli("run", net, "--inputs", "x.npz", *given)
    assert told.code == 2
    assert f"{given[0]} does nothing with --inputs" in told.err


@pytest.mark.thorough
def test_a_plan_of_a_file_is_run(cli, net, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(arrays, "Pipeline", lambda *given: ran.append(given[1]) or Pipeline(*given))
    frame = np.random.default_rng(2).random(SHAPE, dtype=np.float32)
    np.save(tmp_path / "x.npy", frame)
    bundle = tmp_path / "net.tar"
    assert cli("compile", net, "-o", bundle, "--verify", 0).code == 0
    assert cli("plan", bundle, "--stages", 2, "--verify", 0, "-o", tmp_path / "two.json").code == 0
    for model in (bundle, net):
        files = ("--inputs", tmp_path / "x.npy", "--plan", tmp_path / "two.json", "--outputs", tmp_path / "y.npz")
        told = cli("run", model, *files)
        assert told.code == 0, told.err
        np.testing.assert_allclose(np.load(tmp_path / "y.npz")["output0"], expected(net, frame), rtol=1e-4, atol=1e-4)
    assert [len(plan.stages) for plan in ran] == [2, 2]


def test_frames_come_out_in_order_joined_as_the_inputs_are(cli, net, tmp_path):
    several = np.random.default_rng(0).random((4, *SHAPE[1:]), dtype=np.float32)
    wanted = np.concatenate([expected(net, frame[None]) for frame in several])
    for name, array, outputs in (
        ("batch", several, wanted),
        ("stacked", several[:, None], wanted[:, None]),
        ("one", several[:1], wanted[:1]),
    ):
        np.savez(tmp_path / f"{name}.npz", images=array)
        told = cli("run", net, "--inputs", tmp_path / f"{name}.npz", "--outputs", tmp_path / "y.npz", "--json")
        assert told.code == 0, told.err
        assert told.json["frames"] == len(array)
        assert told.json["outputs"] == {"output0": list(outputs.shape)}
        np.testing.assert_allclose(np.load(tmp_path / "y.npz")["output0"], outputs, rtol=1e-4, atol=1e-4)
    np.save(tmp_path / "alone.npy", several[:1])
    told = cli("run", net, "--inputs", tmp_path / "alone.npy")
    assert told.code == 0, told.err
    assert "1 frames" in told.err
    assert "--outputs y.npz writes them" in told.err


@pytest.mark.thorough
@pytest.mark.parametrize("option", ["--isolate", "--no-isolate"])
def test_stages_have_processes_where_that_is_asked(cli, net, tmp_path, monkeypatch, option):
    started = []
    before = children_of(os.getpid())

    class Watched(Pipeline):
        def map(self, frames):
            started.append(children_of(os.getpid()) - before)
            return super().map(frames)

    monkeypatch.setattr(arrays, "Pipeline", Watched)
    frame = np.random.default_rng(1).random(SHAPE, dtype=np.float32)
    np.save(tmp_path / "x.npy", frame)
    told = cli("run", net, option, "--inputs", tmp_path / "x.npy", "--outputs", tmp_path / "y.npz")
    assert told.code == 0, told.err
    assert [bool(processes) for processes in started] == [option == "--isolate"]
    np.testing.assert_allclose(np.load(tmp_path / "y.npz")["output0"], expected(net, frame), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_named_and_nothing_is_written(cli, net, tmp_path):
    zeros = np.zeros(SHAPE, np.float32)
    (tmp_path / "text.npz").write_text("no arrays")
    np.savez(tmp_path / "shape.npz", images=np.zeros((2, 3), np.float32))
    np.savez(tmp_path / "name.npz", image=zeros, other=zeros)
    np.savez(tmp_path / "none.npz", images=zeros[:0])
    np.savez(tmp_path / "objects.npz", images=np.array([{}]))
    np.savez(tmp_path / "good.npz", images=zeros)
    for name, *words in (
        ("missing.npz", "No such file"),
        ("text.npz", "no arrays of NumPy", "numpy.savez"),
        ("objects.npz", "numpy.savez, without arrays of objects"),
        ("shape.npz", "images has the shape [2, 3]", "the input has [1, 3, 64, 64]"),
        ("name.npz", "no input image; did you mean images?"),
        ("none.npz", "at least one; there are images 0"),
    ):
        told = cli("run", net, "--inputs", tmp_path / name, "--outputs", tmp_path / "y.npz")
        assert told.code == 1, (name, told.err)
        assert all(word in told.err for word in (name, *words)), told.err
    for options, word in (
        (("--inputs", tmp_path / "good.npz", "--source", "synthetic"), "--inputs takes one model, and no --source"),
        (("--inputs", tmp_path / "good.npz", "--outputs", tmp_path / "y.txt"), "give the name of an .npz file"),
        (("--outputs", tmp_path / "y.npz", "--source", "synthetic"), "--outputs goes with --inputs"),
    ):
        told = cli("run", net, *options)
        assert told.code == 2, told.err
        assert word in told.err
    assert not list(tmp_path.glob("y.*"))
