"""From a model file to a running pipeline in ten lines: python examples/ten_lines.py model.onnx"""

import sys

from tvm_pipeline import Pipeline, Problem, detect_platform, load, plan, profile_model, settle_platform
from tvm_pipeline.backends.contract import Port
from tvm_pipeline.backends.ports import noise

model = load(sys.argv[1] if len(sys.argv) > 1 else "squeezenet")
backend, platform = settle_platform(detect_platform(model))
compiled = backend.compile(model, platform.devices)
profile = profile_model(backend, compiled, platform)
decision = plan(Problem(compiled.graph, platform, profile, objective="throughput"))
frame = noise(Port("data", compiled.graph.inputs[0].shape, compiled.graph.inputs[0].dtype))
with Pipeline(compiled, decision.plan, platform) as pipeline:
    for result in pipeline.map(frame for _ in range(50)):
        print(result.frame, {name: array.shape for name, array in result.outputs.items()})
    print(decision.why, pipeline.statistics(), sep="\n")
