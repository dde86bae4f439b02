"""tvm-pipeline: a neural network over the processors of one machine, as a measured and proven pipeline.

    import tvm_pipeline as tp

    pipe = tp.compile("model.onnx")     # compiled, measured, planned and verified on this machine
    for outputs in pipe.map(frames):
        ...

`pipe.save` writes a bundle, and `open` opens one. Each step has its own names: `load`, `Problem`, `plan`, `Pipeline`.
The names of `__all__` are the public surface, with `compile` and `open`, which `import *` leaves to Python's own. The
docstring of each has an example that needs no TVM and no hardware;
`tvm_pipeline.testing` has the small network that the examples share. The rooms, from the ground up:

version.py   the version of this package
errors.py    the errors a user can meet, as one tree
addresses.py  addresses of cameras and brokers, shown without their secrets
files.py     reading and writing files, with errors that name them
processes.py  child processes: started, talked to, waited for with limits, ended with their parent
documents.py  JSON, TOML and text of others: what is wrong is said with the file
core/        the vocabulary: graph, platform, profile, problem, plan
solvers/     tools that the searches of several rooms share
memory/      the order of operators that needs the least memory
power/       sensors of power, and the joules between two moments
boards/      the board that this is: module, cores, clocks and heat; its power modes, set and put back
cost/        what a plan costs: its seconds, bytes and joules
planning/    from a Problem to a Plan with its bound
backends/    the contract of a hardware family, and the registry of those installed
tvm/         all that touches TVM
frontends/   model files become Models
profiling/   operators and links measured
calibration/  the model of a device refitted to measured stages
relax.py     passes on Relax modules, for scripts of TVM
runtime/     the running pipeline
workflow/    from a model to a plan that runs, as one call each
report/      tables and pictures
video/       frames in, results out
testing/     for tests of backends
watch/       a running pipeline seen from outside, over HTTP
service/     the application that runs bundles on sources of frames
remote/      a board from here: what is compiled on a workstation is measured and run on a board
fleet/       many boards as one: which host takes which camera, and what happens when one is lost
cli/         the command line
"""

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
from tvm_pipeline.profiling import profile_model
from tvm_pipeline.profiling.stage_timer import stage_timer
from tvm_pipeline.runtime import Pipeline, Result
from tvm_pipeline.version import __version__ as __version__
from tvm_pipeline.workflow.compiled_pipeline import CompiledPipeline
from tvm_pipeline.workflow.compiled_pipeline import compile as compile
from tvm_pipeline.workflow.compiled_pipeline import open as open

__all__ = [
    "Bundle",
    "CompiledPipeline",
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
