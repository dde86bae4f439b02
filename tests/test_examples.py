"""Each example runs as its own docstring says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.onnx_models import write_picture_net
from tests.support.parts import needs

needs("tvm")

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
@pytest.mark.needs("Relay")
def test_relay_passes():
    out = run(EXAMPLES / "relay_passes.py")
    assert "stage_0 on cpu" in out
    assert "stage_1 on cpu" in out
    assert "stages equal bit for bit: True" in out
    assert "pipeline equal bit for bit: True" in out
    assert "pipeline close to plain TVM: True" in out


@pytest.mark.needs("Relax")
@pytest.mark.needs("two cores")
def test_ten_lines(tmp_path):
    out = run(EXAMPLES / "ten_lines.py", write_picture_net(tmp_path / "net.onnx"))
    assert "\n49 {" in out
    assert "has the best throughput" in out or "only plan" in out


def test_centerface_decoder_finds_a_planted_face():
    sys.path.insert(0, str(EXAMPLES / "face_detector"))
    try:
        from centerface import decode
    finally:
        sys.path.pop(0)
    needs("tvm_pipeline_video")
    from tvm_pipeline_video import Transform

    heat, size, offset, marks = (np.zeros((1, n, 8, 8), np.float32) for n in (1, 2, 2, 10))
    heat[0, 0, 3, 5] = 0.9
    heat[0, 0, 3, 6] = 0.5  # the same face seen from the next cell: overlaps and is dropped
    size[0, :, 3, 5] = size[0, :, 3, 6] = np.log(4.0)  # 16 pixels each way
    (face,) = decode(dict(zip("abcd", (heat, size, offset, marks), strict=True)), Transform(0.5, 0.5, 0, 0))
    assert face.score == pytest.approx(0.9)
    # The centre is at ((5 + .5) * 4, (3 + .5) * 4) in the input, twice that in the picture.
    assert face.box == pytest.approx((2 * 14, 2 * 6, 2 * 30, 2 * 22))


def test_classification_decoder_names_the_best():
    sys.path.insert(0, str(EXAMPLES))
    try:
        from classification import decode
    finally:
        sys.path.pop(0)
    needs("tvm_pipeline_video")
    from tvm_pipeline_video import Transform

    scores = np.zeros((1, 10), np.float32)
    scores[0, 7] = 3.0
    best = decode({"scores": scores}, Transform(1, 1, 0, 0))
    assert best[0].label == "class 7"
    assert best[0].score == pytest.approx(np.exp(3) / (np.exp(3) + 9))


@pytest.mark.skipif("TVM_PIPELINE_DEMO" not in os.environ, reason="it is the folder that `make demo` of .ci/run wrote")
def test_the_demo_writes_all_it_promises():
    written = EXAMPLES.parent / os.environ["TVM_PIPELINE_DEMO"]
    names = {path.name for path in written.iterdir()}
    assert names == {"street.jsonl", "street.mp4", "frame.png", "gantt.png", "graph.png", "report.md"}
    rows = [json.loads(line) for line in (written / "street.jsonl").read_text().splitlines()]
    assert [row["frame"] for row in rows] == list(range(250))
    assert all(row["annotations"] for row in rows[14:40])  # the video begins with the roof of a truck
