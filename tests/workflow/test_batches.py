"""Calls of several frames from end to end: compiled, compared with one frame a call, chosen, kept in a bundle, run."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tvm_pipeline as tp
from tests.support.onnx_models import onnx_bytes
from tests.support.parts import needs
from tvm_pipeline.errors import ModelError, OptionError
from tvm_pipeline.workflow import batches
from tvm_pipeline.workflow.batches import AUTO, batches_of

needs("tvm")

PICTURES = [np.random.default_rng(seed).random((1, 3, 32, 32), "float32") for seed in range(7)]


@pytest.fixture(scope="module")
def wide(model):
    with tp.compile(model, verify_s=0, batch=4) as pipe:
        yield pipe


def test_frames_of_a_call_are_those_alone_bit_for_bit(model, wide):
    with tp.compile(model, verify_s=0) as alone:
        for one, other in zip(alone.map(PICTURES), wide.map(PICTURES), strict=True):
            assert one.shape == other.shape == (1, 10)
            assert np.array_equal(one, other)
    assert "4 frames a call" in repr(wide)
    assert wide.bundle.graph.inputs == (tp.Tensor("picture", (1, 3, 32, 32)),)


def test_a_bundle_keeps_its_batch(wide, tmp_path):
    wide.save(tmp_path / "net.tar")
    with tp.open(tmp_path / "net.tar") as opened:
        assert opened.bundle.compiled.graph == wide.bundle.graph
        assert opened.bundle.plan.batch == 4
        assert all(np.array_equal(a, b) for a, b in zip(opened.map(PICTURES), wide.map(PICTURES), strict=True))


@pytest.fixture
def two_batches(monkeypatch):
    """`auto` tries two batches beside one frame a call: each is compiled."""
    monkeypatch.setattr(batches, "AUTO", (2, 4))


def test_the_fastest_batch_is_chosen_and_the_smaller_of_equals(model, two_batches, monkeypatch):
    """The rates are given, since no test depends on how fast the machine is."""
    rates = [[100.0, 102.0, 100.0], [150.0] * 3, [152.0] * 3]
    monkeypatch.setattr(batches, "_rates", lambda *_: rates)
    with tp.compile(model, verify_s=0.1, batch="auto") as pipe:
        assert pipe.bundle.plan.batch == 2
        assert "2 frames a call: fps measured in turns: 100 with 1, 150 with 2, 152 with 4" in pipe.bundle.decision.why


def test_one_frame_a_call_where_more_do_not_pay(model, two_batches, monkeypatch):
    """The last is 5 % faster in the median, but not in each round."""
    rates = [[100.0] * 3, [101.0] * 3, [105.0, 105.0, 99.0]]
    monkeypatch.setattr(batches, "_rates", lambda *_: rates)
    with tp.compile(model, verify_s=0.1, batch="auto") as pipe:
        assert pipe.bundle.plan.batch == pipe.bundle.graph.batch == 1
        assert len(list(pipe.map(PICTURES))) == len(PICTURES)


def test_a_model_that_mixes_frames_is_refused(tmp_path, caplog):
    """A softmax over the frames: each output depends on the other frames of the call."""
    from onnx import helper

    path = tmp_path / "mixing.onnx"
    path.write_bytes(onnx_bytes([helper.make_node("Softmax", ["x"], ["y"], axis=0)], shape=(1, 8)))
    with pytest.raises(ModelError, match="its frames are not apart with 2 a call: output y of a frame is off by"):
        tp.compile(path, verify_s=0, batch=2)
    with tp.compile(path, verify_s=0, batch="auto") as pipe:
        assert pipe.bundle.plan.batch == 1
    assert "2 frames a call are not tried, nor are more" in caplog.text


def test_outputs_that_are_no_parts_of_a_call_are_refused(tmp_path):
    from onnx import helper

    path = tmp_path / "sum.onnx"
    path.write_bytes(onnx_bytes([helper.make_node("ReduceSum", ["x"], ["y"], keepdims=1)], shape=(1, 8)))
    with pytest.raises(ModelError, match=r"the first axis of tensor y of shape .* is not 3 equal parts"):
        tp.compile(path, verify_s=0, batch=3)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "four", "257", "²", ""])
def test_what_is_no_batch_is_refused(text):
    with pytest.raises(
        OptionError, match=r"`batch` .*: give `auto`, or how many frames a call computes, from 1 to 256"
    ):
        batches_of(text, "throughput")


def test_a_batch_is_for_throughput_or_energy():
    assert batches_of("auto", "energy") == AUTO
    assert batches_of("1", "latency") == ()
    with pytest.raises(OptionError, match="for latency, one frame a call is best"):
        batches_of("auto", "latency")


def test_the_command_line(cli, model, tmp_path):
    told = cli("compile", model, "-o", tmp_path / "net.tar", "--batch", 2, "--verify", 0, "--json")
    assert json.loads(told.out)["batch"] == 2
    frames = np.concatenate(PICTURES)
    np.save(tmp_path / "x.npy", frames)
    cli("run", tmp_path / "net.tar", "--inputs", tmp_path / "x.npy", "--outputs", tmp_path / "y.npz")
    with tp.open(tmp_path / "net.tar") as pipe:
        expected = np.concatenate(list(pipe.map(PICTURES)))
    assert np.array_equal(next(iter(np.load(tmp_path / "y.npz").values())), expected)


@pytest.mark.parametrize(
    "others", [("--carry", "a:b"), ("--memory-rewrite",), ("--plan", "plan.txt"), ("--remote", "pi:9090")]
)
def test_what_does_not_go_with_a_batch_is_told(cli, model, tmp_path, others):
    told = cli("compile", model, "-o", tmp_path / "net.tar", "--batch", 2, *others)
    assert told.code
    assert f"{others[0]} does not go with --batch: each batch is compiled and planned anew" in told.err
