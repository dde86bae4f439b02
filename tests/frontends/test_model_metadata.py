"""What model files say about themselves, and what damaged descriptions do: nothing."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest

from tests.support.parts import needs
from tests.support.tiny_yolo import write_tiny_yolo
from tvm_pipeline.errors import ModelError
from tvm_pipeline.frontends import load
from tvm_pipeline.frontends.model_metadata import quantization_of, stated_shape, tflite_metadata

# As LiteRT says of the file below.
QUANTISED = {"input_quantization": "0.01865844801068306 -14", "output_quantization": "0.12460152059793472 -45"}
DATA = Path(__file__).parents[1] / "edgetpu" / "data" / "mobilenet_v2_int8.tflite"


def test_ultralytics_metadata_fills_open_sizes_and_says_so(tmp_path) -> None:
    needs("onnx")
    path = write_tiny_yolo(tmp_path / "net.onnx")
    model = load(path)
    assert model.inputs[0].shape == (1, 3, 64, 64)
    assert model.notes == (
        "images:[1,3,64,64] by the file's metadata (imgsz), which leaves it open; `input_shapes` gives another",
    )
    assert model.metadata["names"] == "{0: 'cat', 1: 'dog'}"
    assert model.metadata["producer_name"] == "pytorch"
    given = load(path, {"images": (1, 3, 96, 96)})
    assert given.inputs[0].shape == (1, 3, 96, 96)
    assert given.notes == ()
    assert load(write_tiny_yolo(tmp_path / "fixed.onnx", open_size=False)).notes == ()


@pytest.mark.parametrize(
    "imgsz", ["", "[0, 64]", "64", "[64, 64", "['a', 'b']", "[64, 64, 3]", "(" * 500, "-" * 100_000, "[64, 99999999]"]
)
def test_sizes_that_are_none_leave_the_input_open(tmp_path, imgsz) -> None:
    needs("onnx")
    import onnx

    proto = onnx.load(write_tiny_yolo(tmp_path / "net.onnx"))
    onnx.helper.set_model_props(proto, {"imgsz": imgsz})
    onnx.save(proto, tmp_path / "net.onnx")
    with pytest.raises(ModelError, match=r"input images has the shape \[1,3,height,width\]"):
        load(tmp_path / "net.onnx")


@pytest.mark.parametrize("text", ["", "1,x", "1", "0 0", "nan 1", "-1 0", "1 0.5", "1 0,"])
def test_a_quantisation_that_is_none(text) -> None:
    assert [pair for pair in quantization_of(text) if pair] in ([], [(1.0, 0)])
    assert quantization_of("0.5 -3,,0.25 0") == [(0.5, -3), None, (0.25, 0)]


def test_only_pictures_are_filled() -> None:
    stated = {"imgsz": "[32, 64]"}
    assert stated_shape(stated, [0, 3, 0, 0]) == (1, 3, 32, 64)
    assert stated_shape(stated, [1, 3, 0, 96]) == (1, 3, 32, 96)
    for extents in ([0, 16], [8, 3, 0, 0], [1, 5, 0, 0], [1, 3, 8, 8]):
        assert stated_shape(stated, extents) is None


def archive(**texts: str | bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, text in texts.items():
            packed.writestr(name.replace("__", "."), text)
    return content.getvalue()


def described(**options: object) -> bytes:
    """Return TFLite's metadata as its schema has it: a model of a subgraph of an input with a mean and a std."""
    from flatbuffers import Builder

    builder = Builder()

    def vector(values: list[float] | list[int], tables: bool) -> int:
        builder.StartVector(4, len(values), 4)
        for value in reversed(values):
            (builder.PrependUOffsetTRelative if tables else builder.PrependFloat32)(value)
        return builder.EndVector()

    def table(fields: int, **slots: int) -> int:
        builder.StartObject(fields)
        for slot, offset in slots.items():
            builder.PrependUOffsetTRelativeSlot(int(slot[1:]), offset, 0)
        return builder.EndObject()

    normal = table(2, s0=vector([127.5], False), s1=vector([128.0], False))
    builder.StartObject(2)
    builder.PrependUint8Slot(0, 1, 0)
    builder.PrependUOffsetTRelativeSlot(1, normal, 0)
    unit = builder.EndObject()
    tensor = table(7, s4=vector([unit], True))
    subgraph = table(8, s2=vector([tensor], True))
    builder.Finish(table(8, s3=vector([subgraph], True)), b"M001")
    return bytes(builder.Output())


def parsed(description: bytes = b""):
    """Return a TFLite model of nothing but this description."""
    import tflite
    from flatbuffers import Builder

    builder = Builder()
    data = builder.CreateByteVector(description)
    tflite.BufferStart(builder)
    tflite.BufferAddData(builder, data)
    buffer = tflite.BufferEnd(builder)
    name = builder.CreateString("TFLITE_METADATA")
    tflite.MetadataStart(builder)
    tflite.MetadataAddName(builder, name)
    tflite.MetadataAddBuffer(builder, 0)
    entry = tflite.MetadataEnd(builder)
    tflite.ModelStartBuffersVector(builder, 1)
    builder.PrependUOffsetTRelative(buffer)
    buffers = builder.EndVector()
    tflite.ModelStartMetadataVector(builder, 1)
    builder.PrependUOffsetTRelative(entry)
    entries = builder.EndVector()
    tflite.ModelStart(builder)
    tflite.ModelAddBuffers(builder, buffers)
    tflite.ModelAddMetadata(builder, entries)
    builder.Finish(tflite.ModelEnd(builder), b"TFL3")
    return tflite.Model.GetRootAsModel(bytes(builder.Output()), 0)


def test_labels_and_normalisation_of_tflite_files(tmp_path) -> None:
    needs("tflite")
    path = tmp_path / "net.tflite"
    path.write_bytes(DATA.read_bytes() + archive(labels__txt="cat\ndog\n"))
    assert load(path).metadata == {"labels": "cat\ndog\n", **QUANTISED}
    names = {"0": "cat", "1": "dog"}
    path.write_bytes(DATA.read_bytes() + archive(metadata__json=json.dumps({"names": names, "task": "detect"})))
    assert load(path).metadata == {"names": "{0: 'cat', 1: 'dog'}", "task": "detect", **QUANTISED}
    assert tflite_metadata(b"", parsed(described())) == {"input_mean": "127.5", "input_std": "128.0"}


@pytest.mark.parametrize("key", ["²", "9" * 6000, "-1"])
def test_keys_that_are_no_numbers_of_classes(tmp_path: Path, key: str) -> None:
    needs("tflite")
    path = tmp_path / "net.tflite"
    path.write_bytes(DATA.read_bytes() + archive(metadata__json=json.dumps({"names": {key: "cat"}})))
    assert load(path).metadata == {"names": str({key: "cat"}), **QUANTISED}


def test_the_texts_of_an_archive_are_limited_together() -> None:
    needs("tflite")
    texts = {f"t{index}__txt": f"{{'k{index}': '{'x' * 400_000}'}}" for index in range(4)}
    assert set(tflite_metadata(archive(**texts), parsed())) == {"k0", "k1"}


def test_damaged_descriptions_are_no_matter() -> None:
    needs("tflite")
    whole = described()
    draw = __import__("random").Random(3)
    for _ in range(300):
        damaged = bytearray(whole[: draw.randrange(4, len(whole) + 1)])
        for _ in range(3):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        found = tflite_metadata(b"", parsed(bytes(damaged)))
        assert set(found) <= {"input_mean", "input_std"}
    packed = archive(labels__txt="cat\n" * 50)
    for _ in range(100):
        damaged = bytearray(packed)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        tflite_metadata(bytes(damaged), parsed())
    assert tflite_metadata(archive(labels__txt=b"\n" * (2 << 20)), parsed()) == {}
