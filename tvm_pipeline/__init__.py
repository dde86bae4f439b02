"""tvm-pipeline: a neural network over the processors of one machine, as a measured and proven pipeline.

    model = load("model.onnx")
    backend, platform = settle_platform(detect_platform(model))
    compiled = backend.compile(model, platform.devices, print)
    profile = profile_model(backend, compiled, platform)
    decision = plan(Problem(compiled.graph, platform, profile))
    with Pipeline(compiled, decision.plan, platform) as pipeline:
        for result in pipeline.map(frames):
            ...

The names below are the whole public surface. The rooms, from the ground up: `graph.py`, `platform.py`, `profile.py`
and `plan.py` are the vocabulary, `evaluate.py` judges plans, `backends/` holds the contract of a hardware family,
`scheduling/` plans, `frontends/` reads model files, `relay/` is all that touches TVM, `profiling/` measures,
`runtime/` runs, `video/` brings and takes frames, `report/` draws, `cli/` is the command line.
"""

__version__ = "0.1.0"

from tvm_pipeline.backends.bundle import Bundle, open_bundle, write_bundle
from tvm_pipeline.backends.registry import detect_platform, settle_platform
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.graph_files import graph_from_networkx, merge_graphs, read_graph
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Decision, Plan, Prediction, Stage, read_plan
from tvm_pipeline.core.platform import Device, Link, Platform, read_platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile, read_profile
from tvm_pipeline.cost.evaluate import Evaluation, evaluate
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.frontends import load
from tvm_pipeline.planning import plan
from tvm_pipeline.profiling import profile_model, stage_timer
from tvm_pipeline.runtime import Pipeline, Result

__all__ = [
    "Bundle",
    "Decision",
    "Device",
    "DeviceProfile",
    "Evaluation",
    "Link",
    "Model",
    "Operator",
    "OperatorGraph",
    "Pipeline",
    "PipelineError",
    "Plan",
    "Platform",
    "Prediction",
    "Problem",
    "Profile",
    "Result",
    "Stage",
    "Tensor",
    "detect_platform",
    "evaluate",
    "graph_from_networkx",
    "load",
    "merge_graphs",
    "open_bundle",
    "plan",
    "profile_model",
    "read_graph",
    "read_plan",
    "read_platform",
    "read_profile",
    "settle_platform",
    "stage_timer",
    "write_bundle",
]
