"""From a model to results in three lines of Python, by the plan that the command line finds."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tvm_pipeline as tp
from tests.support.parts import needs
from tvm_pipeline.errors import BundleError, ModelError, OptionError
from tvm_pipeline.workflow import steps

needs("tvm")

PICTURES = [np.random.default_rng(seed).random((1, 3, 32, 32), "float32") for seed in range(4)]


@pytest.fixture(scope="module")
def pipe(model):
    with tp.compile(model, verify_s=0) as pipe:
        yield pipe


@pytest.mark.thorough
def test_one_stream_after_another(pipe):
    first, second = list(pipe.map(PICTURES)), list(pipe.map(iter(PICTURES[:2])))
    assert [output.shape for output in first] == [(1, 10)] * 4
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=False))
    assert np.array_equal(pipe(PICTURES[0]), first[0])
    assert len(second) == 2


def test_what_was_saved_computes_the_same(pipe, tmp_path):
    pipe.save(tmp_path / "net.tar")
    opened = tp.open(tmp_path / "net.tar")
    assert repr(opened) == repr(pipe)
    assert all(np.array_equal(a, b) for a, b in zip(opened.map(PICTURES), pipe.map(PICTURES), strict=True))
    opened.close()
    opened.close()


def test_it_says_what_it_is(pipe):
    assert repr(pipe).startswith("<net: ")
    assert "frames a second predicted" in repr(pipe)


def test_the_plan_is_that_of_the_command_line(pipe, cli, model, monkeypatch, tmp_path):
    monkeypatch.setattr(steps.HERE.__class__, "profile", lambda *_: pipe.bundle.profile)
    ours = tp.compile(model, objective="latency", verify_s=0).bundle.plan
    told = cli("compile", model, "-o", tmp_path / "net.tar", "--objective", "latency", "--verify", 0, "--json")
    with tp.open(tmp_path / "net.tar") as theirs:
        assert theirs.bundle.plan == ours
    assert json.loads(told.out)


def test_a_relay_module_with_its_parameters():
    relay = pytest.importorskip("tvm.relay")
    x, w = relay.var("x", shape=(1, 8)), relay.var("w", shape=(4, 8))
    mod = __import__("tvm").IRModule.from_expr(relay.Function([x, w], relay.nn.dense(relay.nn.relu(x), w)))
    weight = np.random.default_rng(0).random((4, 8), "float32")
    frame = np.linspace(-1, 1, 8, dtype="float32").reshape(1, 8)
    with tp.compile(mod, {"w": weight}, verify_s=0) as pipe:
        assert np.allclose(pipe(frame), np.maximum(frame, 0) @ weight.T, atol=1e-5)


def test_what_is_no_model_is_refused(tmp_path, bundle):
    with pytest.raises(ModelError, match="int is no module of TVM"):
        tp.compile(3)
    with pytest.raises(ModelError, match=r"none\.onnx: no such file"):
        tp.compile("none.onnx")
    with pytest.raises(BundleError, match=r"none\.tar"):
        tp.open("none.tar")
    with pytest.raises(OptionError, match="objective"):
        tp.compile("resnet-50", objective="speed")
    for wrong in ({"stages": 0}, {"verify_s": float("nan")}):
        with pytest.raises(OptionError, match=f"`{next(iter(wrong))}`"):  # before the model is loaded
            tp.compile("none.onnx", **wrong)
