"""Several models on one Edge TPU: their slices go through the compiler together, as a deployment needs it."""

from __future__ import annotations

import tarfile

import numpy as np

from tests.support.command import run_command
from tests.support.parts import needs

needs("ai_edge_litert")

from tests.edgetpu.fakes import write_compiler
from tests.edgetpu.networks import random_feeds, random_network, run
from tvm_pipeline import Pipeline, load, open_bundle

PLATFORM = 'name = "one"\n[[device]]\nname = "tpu0"\nbackend = "edgetpu"\ntarget = "usb:0"\n'


def test_models_that_share_an_edge_tpu_are_compiled_in_one_call(capfd, monkeypatch, tmp_path):
    write_compiler(tmp_path)
    calls = tmp_path / "calls"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("FAKE_EDGETPU_CALLS", str(calls))
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "one.toml").write_text(PLATFORM)
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.tflite").write_bytes(random_network(seed))
    out = tmp_path / "out"
    models = (f"{tmp_path}/a.tflite@5", f"{tmp_path}/b.tflite@5")
    outcome = run_command(capfd, monkeypatch, "deploy", *models, "--platform", tmp_path / "one.toml", "-o", out)
    assert outcome.code == 0, outcome.err
    assert len(calls.read_text().splitlines()) == 1
    assert "not here: tpu0" in outcome.err
    for name, index in (("a", 0), ("b", 1)):
        with tarfile.open(out / f"{index}-{name}.tar") as tar:
            assert any(member.endswith("_edgetpu.tflite") for member in tar.getnames())
        content = load(tmp_path / f"{name}.tflite").content
        with open_bundle(out / f"{index}-{name}.tar") as bundle:
            feeds = random_feeds(bundle.graph)
            with Pipeline(bundle.compiled, bundle.plan, bundle.platform) as pipeline:
                pipeline.submit(feeds)
                outputs = pipeline.result().outputs
        expected = run(content, feeds, xnnpack=True)
        assert all(np.array_equal(outputs[tensor], expected[tensor]) for tensor in expected)
