"""What a newcomer types by mistake is answered in one line that says what to do, before anything is compiled."""

from __future__ import annotations

import json

import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.parts import needs
from tests.support.tiny_yolo import write_tiny_yolo

needs("tvm_pipeline_video")

ANSWERS = [
    (("compile", "squeeznet", "-o", "x.tar"), 1, "squeeznet: no such file", "did you mean squeezenet?"),
    (("compile", "resnet50", "-o", "x.tar"), 1, "did you mean resnet-50?"),
    (("compile", "nothing.xyz", "-o", "x.tar"), 1, "no such file", "built-in are squeezenet"),
    (("compile", "model.pt", "-o", "x.tar"), 1, "PyTorch", "yolo export model=model.pt format=onnx"),
    (("compile", "model.keras", "-o", "x.tar"), 1, "pip install tf2onnx"),
    (("compile", "model.engine", "-o", "x.tar"), 1, "TensorRT", "the .onnx file that it was made from"),
    (("run", "model.pt", "--source", "synthetic"), 1, "yolo export model=model.pt format=onnx"),
    (("run", "m.onnx", "--source", "synthetic", "--output", "out.xyz"), 2, "--output out.xyz: a video needs one of"),
    (("run", "m.onnx", "--source", "synthetic", "--platform", "no.toml"), 2, "--platform no.toml: there is no such"),
    (("run", "m.tar", "--source", "synthetic", "--device", "cpu"), 2, "--device: m.tar is a bundle, which has its own"),
    (("compile", "mlp", "-o", "x.tar", "--objective", "latncy"), 2, "no --objective 'latncy'; did you mean latency?"),
    # The network is not there, so the answer comes before it is looked for.
    (("plan", "nothing.onnx", "--stages", "0"), 2, "--stages 0: a plan has at least one stage"),
    (("compile", "nothing.onnx", "-o", "x.tar", "--min-throughput", "9"), 2, "--min-throughput goes with objective"),
    (("compile", "mlp", "-o", "x.tar", "--scheduler", "idels"), 2, "--scheduler idels", "did you mean ideals?"),
    (
        ("compile", "mlp", "-o", "x.tar", "--device", "npu"),
        2,
        "--device npu: this machine has no such device",
    ),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: " ".join(answer[0]))
def test_a_mistake_is_answered_by_what_to_do(cli, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, code, *words = answer
    told = cli(*arguments)
    assert told.code == code, told.err
    assert all(word in told.err for word in words), told.err
    assert not list(tmp_path.iterdir())


def test_a_misspelt_file_is_found_beside_the_others(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "detector.onnx").write_bytes(b"x")
    assert "did you mean detector.onnx?" in cli("compile", "detektor.onnx", "-o", "x.tar").err


def test_an_input_that_is_no_picture_is_refused_before_it_is_compiled(cli, tmp_path):
    """CenterFace's file has ten pictures of 32 x 32 for its input; the error names the input and a shape."""
    shape = (10, 3, 32, 32)
    node = helper.make_node("Relu", ["input.1"], ["y"])
    inputs, outputs = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("input.1", "y"))
    onnx.save(helper.make_model(helper.make_graph([node], "net", [inputs], [outputs])), tmp_path / "ten.onnx")
    told = cli("run", tmp_path / "ten.onnx", "--source", "synthetic")
    assert told.code == 2, told.err
    assert '--input-shapes "input.1:[1,3,32,32]", with the height and width that the model was made for' in told.err
    assert "is compiled" not in told.err
    vector = helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 40))
    node = helper.make_node("Relu", ["x"], ["y"])
    onnx.save(helper.make_model(helper.make_graph([node], "net", [vector], [outputs])), tmp_path / "sound.onnx")
    assert "to run it on arrays, give --inputs" in cli("run", tmp_path / "sound.onnx", "--source", "synthetic").err


@pytest.mark.parametrize("command", ["run", "compile"])
def test_labels_of_another_number_are_refused_before_the_model_is_compiled(command, cli, tmp_path, monkeypatch):
    from tvm_pipeline.cli import compile as command_module
    from tvm_pipeline_video.service import model_bundle

    for module in (command_module, model_bundle):
        monkeypatch.delattr(module, "compile_source")
    net, labels = write_tiny_yolo(tmp_path / "net.onnx"), tmp_path / "labels.txt"
    labels.write_text("cat\ndog\nbird\n")
    output = ("-o", tmp_path / "x.tar") if command == "compile" else ()
    told = cli(command, net, "--labels", labels, "--source", "synthetic:64x64@30:9", *output)
    assert told.code == 2, told.err
    assert "--labels: there are 3, and the model has 2 classes" in told.err


@pytest.mark.parametrize(
    "command", [("plan", "mlp", "true"), ("deploy", "mlp@9", "true@9")], ids=lambda given: given[0]
)
def test_a_misspelt_model_is_told_before_the_others_are_compiled(command, cli, monkeypatch):
    from tvm_pipeline.workflow import steps

    monkeypatch.delattr(steps, "compile_source")
    assert "true: no such file, and no built-in network" in cli(*command).err


def test_a_number_is_a_camera_unless_a_file_has_this_name(tmp_path, monkeypatch):
    from tvm_pipeline_video import source_kind

    monkeypatch.chdir(tmp_path)
    assert source_kind("0").name == "camera"
    (tmp_path / "0").write_bytes(b"x")
    assert source_kind("0").name == "file"


def test_schedulers_are_listed_with_what_each_does(cli):
    told = cli("plan", "mlp", "--scheduler", "help")
    assert told.code == 0
    assert "cp-sat                    the best pipeline of all cuts, by OR-tools" in told.out


def test_devices_are_chosen_by_kind_and_name(cli, tmp_path):
    """The platform's other devices are in no plan."""
    nodes = [{"name": name, "op": "conv2d", "output_bytes": 8} for name in ("a", "b")]
    (tmp_path / "n.json").write_text(json.dumps({"name": "n", "nodes": nodes, "edges": [[0, 1]]}))
    rate = "macs_per_s = 1e9"
    devices = "".join(
        f'[[device]]\nname = "{name}"\nbackend = "{backend}"\n{cores}\n[device.model]\n{rate}\n'
        for name, backend, cores in (("big", "host", "cores = [0]"), ("card", "gpu", ""), ("usb", "edgetpu", ""))
    )
    (tmp_path / "box.toml").write_text(f'name = "box"\n{devices}')
    for chosen, expected in (("cpu", {"big"}), ("tpu", {"usb"}), ("card,big", {"card", "big"})):
        told = cli("plan", tmp_path / "n.json", "--platform", tmp_path / "box.toml", "--device", chosen, "--json")
        assert told.code == 0, told.err
        used = {name for stage in told.json["stages"] for name in stage["devices"]}
        assert used <= expected, chosen
