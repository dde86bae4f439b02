"""An int8 .tflite in Relay: what an Edge TPU takes becomes regions of a plain relay.build.

python examples/edge_tpu/byoc.py [model.tflite] [usb:0]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import tflite
from tvm import relay

from tvm_pipeline_edgetpu.byoc import load_executor, partition_for_edgetpu
from tvm_pipeline_edgetpu.model import read_model
from tvm_pipeline_tvm.relay.fold import fast_build

ready = Path(__file__).parents[2] / "tests" / "edgetpu" / "data" / "mobilenet_v2_int8.tflite"
path = Path(sys.argv[1]) if len(sys.argv) > 1 else ready
device = sys.argv[2] if len(sys.argv) > 2 else "cpu"

source = read_model(path)
mod, params = relay.frontend.from_tflite(tflite.Model.GetRootAsModel(path.read_bytes(), 0))
mod = partition_for_edgetpu(mod, params, source, device)
for symbol, function in mod.functions_items():
    if "edgetpu_operators" in function.attrs:
        count, where = len(function.attrs["edgetpu_operators"]), "TFLite's CPU kernels" if device == "cpu" else device
        print(f"{symbol.name_hint}: {count} of {len(source.graph)} operators on {where}")

# relay.build(mod, "llvm", params=params) does the same, more slowly where TVM has constants to fold.
library = fast_build(mod, "llvm", params)
with tempfile.TemporaryDirectory() as folder:
    exported = Path(folder) / "model.so"
    library.export_library(str(exported))
    print(f"exported: {exported.stat().st_size} bytes, of a .tflite of {path.stat().st_size}")
    executor = load_executor(exported)

rng = np.random.default_rng(0)
for tensor in source.graph.inputs:
    limits = np.iinfo(tensor.dtype)
    executor.set_input(tensor.name, rng.integers(limits.min, limits.max, tensor.shape, tensor.dtype, endpoint=True))
executor.run()
scores = executor.get_output(0).numpy().ravel()
print(f"of noise, class {scores.argmax()} has the highest of {scores.size} scores: {scores.max()}")
