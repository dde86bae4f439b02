"""The networks that benchmarks measure: built-in ones, those that the onnx package carries, and files.

The built-in ones are Relay's. An environment without Relay reads them from the cache, where export_networks.py wrote
them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tvm_pipeline import frontends
from tvm_pipeline.core.model import TOLERANCE, Model
from tvm_pipeline.files import cache_folder

try:
    from tests.support.networks import NETWORKS, as_model, relay_module
    from tvm_pipeline_tvm.relay.importer import import_model

    HAS_RELAY = True
except ImportError:
    HAS_RELAY, NETWORKS = False, {}

MODELS = (
    *("squeezenet", "mobilenet", "resnet-18", "resnet-50", "densenet-121", "inception_v3"),
    *("light_inception_v1", "light_inception_v2", "light_shufflenet"),
    "centerface",
)
EXPORTED = cache_folder() / "networks"
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
# Where sums grow: light_shufflenet's of linear convolutions, and resnet-50's 16 residual ones.
GAIN = {"light_shufflenet": 0.6, "resnet-50": 0.8}


def load(name: str) -> Model:
    """Load a name that `frontends.load` knows, `light_NAME` of onnx, `centerface`, one of the tests', or a file."""
    if name in MODELS and not HAS_RELAY:
        return frontends.load(exported(name))
    if name in NETWORKS:
        return as_model(name, *relay_module(name))
    if name.startswith("light_"):
        return light(name)
    if name == "mobilenet":
        return mobilenet()
    if name == "centerface":
        sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "face_detector"))
        from assets import MODEL, fetch

        return frontends.load(fetch(MODEL), {"input.1": (1, 3, 288, 640)})
    return frontends.load(name)


def load_lively(described: str) -> Model:
    """Load what `load` knows, `squeezenet@64` for its side, `net.onnx@x:[1,3,320,320]` for shapes.

    Built-in networks get weights under which outputs differ: as they come, all classes are about equally likely.
    """
    name, _, side = described.partition("@")
    shapes = frontends.parse_shapes(side if ":" in side else f"data:[1,3,{side},{side}]") if side else None
    model = frontends.load(name, shapes) if shapes else load(name)
    if model.format != "relay.testing":
        return model
    if not HAS_RELAY:
        raise SystemExit(f"{described}: only Relay, which is not here, makes it for other pictures; leave out @")
    return lively(model)


def exported(name: str) -> Path:
    """Return the file that export_networks.py wrote for a network."""
    file = EXPORTED / f"{name}.onnx"
    if not file.exists():
        command = f"python benchmarks/export_networks.py {EXPORTED} {name}"
        raise SystemExit(f"{name} is a network of Relay, which is not here. Run this where it is: {command}")
    return file


def lively(model: Model) -> Model:
    """Return a network with seeded random weights that keep the size of values from layer to layer."""
    import tvm

    mod, params = import_model(model)
    draw = np.random.default_rng(0)
    for key, array in sorted(params.items()):
        if len(array.shape) > 1:
            gain = GAIN.get(model.name, 1.0) if len(array.shape) > 2 else 0.3  # a softmax near one class tells little
            values = draw.standard_normal(array.shape) * gain * np.sqrt(2 / np.prod(array.shape[1:]))
            params[key] = tvm.nd.array(values.astype("float32"))
    return replace(as_model(model.name, mod, params), tolerance=model.tolerance)


def light(name: str, seed: int = 0) -> Model:
    """Return a model of the onnx package with seeded random weights.

    As they come, all weights of a tensor are one number, so that every channel and every output is the same and
    a mistake would not show.
    """
    proto = onnx.load(LIGHT / f"{name}.onnx")
    graph, draw = proto.graph, np.random.default_rng(seed)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    near_one = {
        node.input[position] for node in graph.node if node.op_type == "BatchNormalization" for position in (1, 4)
    }
    fills = [node for node in graph.node if node.op_type == "ConstantOfShape"]
    shapes = {node.output[0]: tuple(constants.pop(node.input[0])) for node in fills}
    shapes.update({key: value.shape for key, value in constants.items() if value.dtype == np.float32})
    for key, shape in shapes.items():
        if len(shape) > 1:
            values = draw.standard_normal(shape) * GAIN.get(name, 1) * np.sqrt(2 / np.prod(shape[1:]))
        elif key in near_one or "/sc_w" in key:
            values = draw.uniform(0.8, 1.2, shape)
        else:
            values = draw.standard_normal(shape) * 0.1
        constants[key] = values.astype(np.float32)
    nodes = [node for node in graph.node if node.op_type != "ConstantOfShape"]
    inputs = [value for value in graph.input if value.name in ("data_0", "gpu_0/data_0")]
    made = onnx.helper.make_graph(
        nodes, name, inputs, graph.output, [numpy_helper.from_array(value, key) for key, value in constants.items()]
    )
    made_model = onnx.helper.make_model(made, opset_imports=proto.opset_import, ir_version=8)
    return frontends.onnx.read(name, LIGHT / f"{name}.onnx", made_model.SerializeToString(), {}, {})


def mobilenet(seed: int = 0) -> Model:
    """Return the built-in network with weights under which values do not vanish: its own end at 1e-18."""
    import tvm

    mod, params = import_model(frontends.load("mobilenet"))
    draw = np.random.default_rng(seed)
    for key, array in sorted(params.items()):
        if len(array.shape) > 1:
            values = draw.standard_normal(array.shape) * np.sqrt(2 / np.prod(array.shape[1:]))
            params[key] = tvm.nd.array(values.astype("float32"))
    return replace(as_model("mobilenet", mod, params), tolerance=TOLERANCE)
