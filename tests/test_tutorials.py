"""The tutorials run: their commands and programs, in the order of the page, on small models and a short video.

A file whose first line names it, as `# service.toml`, is written first. What needs hardware or the network is replaced
by what the table says, or left out if it prepares a machine.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import tvm_pipeline
from tests.support.command import run_command
from tests.support.parts import needs
from tvm_pipeline.backends.trial import Trial

PAGES = Path(__file__).parents[1] / "docs/tutorials"
NAMES = sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "index")
MOST_LINES = 80
NOT_RUN = ("pip install", "yolo export", "sudo", "python3 -m venv")  # they prepare a machine
FAKE_PROVIDER = "FakeExecutionProvider fail=Nothing"
INSTEAD = {
    "--source 0": "--source bikes.mp4 --limit 5",
    "--classes person,bicycle": "--classes cat,dog",  # of the small model
    "--device gpu,cpu": "--device cpu",
    "--watch 9600": "--watch 0",
    "service.toml --supervise": "service.toml --limit 3",  # tests/plugins/video/service/test_supervisor.py
    "--seconds 1 --rounds 2": "--seconds 0.1 --rounds 1",
    "cores = [0, 1, 2, 3]": "cores = [0]",
    'target = "GPU INFERENCE_PRECISION_HINT=f16"': 'target = "HETERO:CPU"',
    'target = "NPU"': 'target = "HETERO:CPU"',
    'target = "TensorrtExecutionProvider trt_fp16_enable=1"': f'target = "{FAKE_PROVIDER}"',
    'target = "TensorrtExecutionProvider trt_fp16_enable=1 trt_dla_enable=1 trt_dla_core=0"': (
        f'target = "{FAKE_PROVIDER}"'
    ),
    "watch = 9600": "watch = 0\nlimit = 5",
    "rtsp://user:password@gate.local/stream": "synthetic:64x48@30:5",
    "rtsp://user:password@yard.local/stream": "synthetic:48x64@30:5",
    "mqtt://pipeline:password@broker.local/cameras": "found.jsonl",
    "home-assistant = true\n": "",  # needs the broker; tests/plugins/video/service/test_home_assistant.py
}


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and the text of each block of code, with what stands in."""
    text = (PAGES / f"{page}.md").read_text()
    for written, replaced in INSTEAD.items():
        text = text.replace(written, replaced)
    return re.findall(r"(?m)^```(\w+)\n(.*?)^```", text, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the reader has the models and the video that the pages name."""
    for part in ("tvm", "onnx", "av", "tvm_pipeline_video"):
        needs(part)
    from tests.edgetpu.test_edge_tpu_command import picture_network
    from tests.plugins.video.test_sources import encode
    from tests.support.onnx_models import write_picture_net
    from tests.support.tiny_yolo import write_tiny_yolo

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(tvm_pipeline.compile.__kwdefaults__, "verify_s", 0.0)  # tests/cli measures candidates
    write_picture_net(tmp_path / "model.onnx")
    write_tiny_yolo(tmp_path / "yolov8n.onnx")
    (tmp_path / "model.tflite").write_bytes(picture_network())
    encode(tmp_path / "bikes.mp4")
    return tmp_path


@pytest.mark.thorough
@pytest.mark.parametrize("page", NAMES)
def test_a_tutorial_runs(
    page: str, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {"frames": [np.zeros((1, 3, 32, 32), np.float32)] * 3}
    if page == "tvm-module":
        needs("Relax")
        import onnx
        from tvm.relax.frontend.onnx import from_onnx

        given["mod"], given["params"] = from_onnx(onnx.load("model.onnx")), {}
    if page == "jetson-dla":
        needs("onnxruntime")
        from tests.support import fake_provider
        from tvm_pipeline_onnxruntime import backend

        fake_provider.install(monkeypatch.setattr)
        monkeypatch.setattr(backend, "_trial", Trial("tests.support.fake_provider:serve"))
        monkeypatch.setattr(backend, "_listed", None)
    if page == "intel":
        needs("openvino")
    for language, text in blocks(page):
        if named := re.match(r"# (\S+\.toml)\n", text):
            (folder / named[1]).write_text(text)
        elif language == "python":
            exec(text, given)
        elif language == "sh":
            for line in text.splitlines():
                if line.startswith("chmod 600 "):
                    (folder / line.split()[2]).chmod(0o600)
                elif not line.startswith(NOT_RUN):
                    program, command, *options = shlex.split(line, comments=True)
                    assert program == "tvm-pipeline", line
                    measures = command in ("compile", "run") and not {"--verify", "--plan", "--config"} & {*options}
                    quick = ("--verify", "0") if measures and "--inputs" not in options else ()
                    done = run_command(capfd, monkeypatch, command, *options, *quick)
                    assert done.code == 0, f"{line}: {done.err}"
    assert len(given) > 1 or not any(language == "python" for language, _ in blocks(page))


def test_each_page_is_listed_and_short() -> None:
    index = (PAGES / "index.md").read_text()
    for page in NAMES:
        assert f"({page}.md)" in index
        assert len((PAGES / f"{page}.md").read_text().splitlines()) <= MOST_LINES
    assert len(NAMES) == 11


def test_what_stands_in_is_in_the_pages() -> None:
    pages = "".join((PAGES / f"{page}.md").read_text() for page in NAMES)
    assert [written for written in INSTEAD if written not in pages] == []
