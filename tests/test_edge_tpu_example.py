"""The example for Edge TPUs: what reads foreign weights, what classifies, and the environment that TensorFlow gets."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.parts import needs

needs("ai_edge_litert")
needs("av")
needs("tvm_pipeline_video")

from PIL import Image

from tests.edgetpu.networks import MOBILENET, run
from tvm_pipeline_edgetpu.delegate import edge_tpus
from tvm_pipeline_video import VideoFile, open_source

EXAMPLE = Path(__file__).parents[1] / "examples" / "edge_tpu"


@pytest.fixture(autouse=True)
def example_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)


# Weights. The files are written opcode by opcode: PyTorch is not here, and pickle writes no class that is not.


def fragment(value: object) -> bytes:
    """A plain value inside a pickle."""
    return pickle.dumps(value, 2)[2:-1]


def tensor(key: str, count: int, offset: int, shape: tuple, strides: tuple, storage: bytes = b"FloatStorage") -> bytes:
    """A tensor as PyTorch pickles it: MARK ... TUPLE, BINPERSID, and REDUCE of a global function."""
    where = b"(" + fragment("storage") + b"ctorch\n" + storage + b"\n"
    where += b"".join(map(fragment, (key, "cpu", count, None))) + b"tQ"
    arguments = (
        b"(" + where + b"".join(map(fragment, (offset, shape, strides, False))) + b"ccollections\nOrderedDict\n)Rt"
    )
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R"


def state_dict(tensors: dict[str, bytes], storages: dict[str, np.ndarray]) -> bytes:
    """A file of PyTorch's format from before version 1.6."""
    named = b"\x80\x02ccollections\nOrderedDict\n)R("
    named += b"".join(fragment(name) + content for name, content in tensors.items()) + b"u."
    head = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    raw = b"".join(struct.pack("<q", array.size) + array.tobytes() for array in storages.values())
    return b"".join(head) + named + pickle.dumps(list(storages), 2) + raw


def read(folder: Path, content: bytes) -> dict[str, np.ndarray]:
    from state_dict import read_state_dict

    (folder / "weights.pth").write_bytes(content)
    return read_state_dict(folder / "weights.pth")


@given(shape=st.lists(st.integers(1, 4), max_size=4), before=st.integers(0, 3), seed=st.integers(0, 99), data=st.data())
def test_tensors_come_back_as_they_lay_in_memory(tmp_path_factory, shape, before, seed, data):
    order = data.draw(st.permutations(range(len(shape))))
    whole = np.random.default_rng(seed).standard_normal(before + int(np.prod(shape))).astype("<f4")
    wanted = whole[before:].reshape(shape).transpose(order)
    strides = tuple(step // 4 for step in wanted.strides)
    count = np.array([7], "<i8")
    content = state_dict(
        {
            "a.weight": tensor("1", whole.size, before, wanted.shape, strides),
            "a.count": tensor("2", 1, 0, (), (), b"LongStorage"),
            "tied": tensor("1", whole.size, 0, whole.shape, (1,)),
        },
        {"2": count, "1": whole},
    )
    found = read(tmp_path_factory.mktemp("weights"), content)
    assert list(found) == ["a.weight", "a.count", "tied"]
    np.testing.assert_array_equal(found["a.weight"], wanted)
    np.testing.assert_array_equal(found["tied"], whole)
    assert found["a.count"] == 7


@pytest.mark.parametrize("asked", ["os\nsystem", "builtins\neval", "torch\nload", "collections\nCounter"])
def test_weights_may_call_nothing_but_what_makes_tensors(tmp_path, asked):
    called = tmp_path / "called"
    attack = f"c{asked}\n".encode() + fragment((f"touch {called}",)) + b"R"
    with pytest.raises(pickle.UnpicklingError, match=re.escape(asked.replace("\n", "."))):
        read(tmp_path, state_dict({"w": attack}, {}))
    assert not called.exists()


def test_a_dotted_name_does_not_lead_out_of_what_is_admitted(tmp_path):
    attack = fragment("collections") + fragment("OrderedDict.__init__") + b"\x93" + fragment(()) + b"R"
    with pytest.raises(pickle.UnpicklingError, match=r"OrderedDict\.__init__"):
        read(tmp_path, state_dict({"w": attack}, {}))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"PK\x03\x04" + bytes(40), id="the newer format"),
        pytest.param(b"", id="empty"),
        pytest.param(state_dict({"w": tensor("1", 4, 0, (4,), (1,))}, {"1": np.zeros(4, "<f4")})[:-1], id="cut short"),
        pytest.param(
            state_dict({"w": tensor("1", 4, 0, (4,), (1,))}, {"1": np.zeros(3, "<f4")}), id="storage too small"
        ),
        pytest.param(state_dict({"w": tensor("1", 4, 2, (3,), (1,))}, {"1": np.zeros(4, "<f4")}), id="beyond the end"),
        pytest.param(state_dict({"w": tensor("1", 4, 3, (3,), (-1,))}, {"1": np.zeros(4, "<f4")}), id="backwards"),
        pytest.param(state_dict({"w": tensor("1", 4, 0, (4,), (1,))}, {"2": np.zeros(4, "<f4")}), id="another key"),
        pytest.param(state_dict({"w": tensor("1", -4, 0, (4,), (1,))}, {"1": np.zeros(4, "<f4")}), id="negative count"),
    ],
)
def test_damaged_weights_are_refused_by_name(tmp_path, content):
    with pytest.raises(pickle.UnpicklingError, match=r"weights\.pth"):
        read(tmp_path, content)


# TensorFlow's environment, in whose place stands this one's interpreter.


def made_environment(folder: Path) -> Path:
    from tensorflow_tool import REQUIREMENT

    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / f"{REQUIREMENT}.installed").touch()
    return folder


def test_a_script_runs_in_the_environment_that_is_there(tmp_path):
    from tensorflow_tool import run_with_tensorflow

    script = tmp_path / "script.py"
    script.write_text("import sys; open(sys.argv[1], 'w').write(sys.executable)")
    run_with_tensorflow(script, [tmp_path / "out"], made_environment(tmp_path / "tools"))
    assert (tmp_path / "out").read_text() == str(tmp_path / "tools" / "bin" / "python")


def test_a_script_that_fails_ends_the_program(tmp_path, capfd):
    from tensorflow_tool import run_with_tensorflow

    script = tmp_path / "script.py"
    script.write_text("raise RuntimeError('no such layer')")
    with pytest.raises(SystemExit, match=r"script\.py failed"):
        run_with_tensorflow(script, [], made_environment(tmp_path / "tools"))
    assert "no such layer" in capfd.readouterr().err


def test_a_full_disk_is_said_before_anything_is_installed(tmp_path, monkeypatch):
    from tensorflow_tool import run_with_tensorflow

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**10, 9 * 10**9, 10**9))
    with pytest.raises(SystemExit, match=r"1\.0 GB are free .* --tools"):
        run_with_tensorflow(tmp_path / "script.py", [], tmp_path / "tools")
    assert not any((tmp_path / "tools").iterdir())


# Classification.


def test_a_softmax_of_8_bits_is_shares_of_256():
    from classify import best_classes

    scores = np.zeros((1, 1000), np.uint8)
    scores[0, [3, 8, 5]] = 128, 64, 32  # the rest, an eighth, was rounded away
    names = [f"class {index}" for index in range(1000)]
    best = [(found.label, found.score) for found in best_classes(scores, 1 / 256, 0, names)]
    assert best == [("class 3", 0.5), ("class 8", 0.25), ("class 5", 0.125)]
    signed = (scores.astype(int) - 128).astype(np.int8)
    assert [found.score for found in best_classes(signed, 1 / 256, -128, names)] == [0.5, 0.25, 0.125]


def test_scores_without_a_softmax_are_given_one():
    from classify import best_classes

    best = best_classes(np.array([[10, -20, 12]], np.int8), 0.5, -4, ["a", "b", "c"])
    weights = np.exp([8.0, 7.0, -8.0])  # .5 * (12 + 4), .5 * (10 + 4), .5 * (-20 + 4)
    assert [found.label for found in best] == ["c", "a", "b"]
    np.testing.assert_allclose([found.score for found in best], weights / weights.sum())


MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
SCALE, ZERO = 0.018658448, -14  # of MobileNetV2's input


@pytest.mark.thorough
@pytest.mark.skipif(bool(edge_tpus()), reason="what an Edge TPU computes differs from TFLite's CPU kernels")
def test_pictures_and_a_video_are_classified_as_by_the_whole_file(tmp_path):
    y, x = np.mgrid[:224, :224]
    picture = np.stack([x, y, (x + y) // 2], axis=-1).astype(np.uint8)
    picture[60:160, 60:160] = 255 - picture[60:160, 60:160]
    Image.fromarray(picture).save(tmp_path / "picture.png")
    with VideoFile(tmp_path / "video.mp4", 25.0) as video:
        for shift in range(6):
            video.write(np.roll(picture, 8 * shift, axis=1))
    (tmp_path / "labels.txt").write_text("\n".join(f"class-{index}" for index in range(1000)))
    (tmp_path / "mobilenet.toml").write_text(
        f'size = [224, 224]\nlayout = "NHWC"\ndtype = "int8"\nmean = {list(MEAN)}\nstd = {list(STD)}\n'
        f"quantization = [{SCALE}, {ZERO}]\n"
    )
    command = [sys.executable, EXAMPLE / "classify.py", MOBILENET, "--stages", "2", "--labels", "labels.txt"]
    command += ["--pictures", "picture.png", "--video", "video.mp4", "--output", "out.mp4"]
    command += ["--preprocessing", "mobilenet.toml"]
    environment = {**os.environ, "COLUMNS": "200", "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "not here: tpu0, tpu1. Stages run on TFLite's CPU kernels" in done.stdout
    # The whole file, its input worked out here.
    values = np.rint((picture - np.array(MEAN)) / STD / SCALE + ZERO).clip(-128, 127).astype(np.int8)
    (scores,) = run(MOBILENET.read_bytes(), {"serving_default_x:0": values[None]}, xnnpack=True).values()
    labels = re.search(r"picture\.png: class-(\d+)", done.stdout)
    assert labels
    assert scores[0, int(labels[1])] == scores.max()
    assert "video.mp4: 6 frames" in done.stdout
    with open_source(str(tmp_path / "out.mp4")) as written:
        assert len(list(written)) == 6
