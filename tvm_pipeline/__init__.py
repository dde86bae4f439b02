"""tvm-pipeline: a neural network over the processors of one machine, as a measured and proven pipeline.

    import tvm_pipeline as tp

    pipe = tp.compile("model.onnx")     # compiled, measured, planned and verified on this machine
    for outputs in pipe.map(frames):
        ...

`pipe.save` writes a bundle, and `open` opens one. Each step has its own names: `load`, `Problem`, `plan`, `Pipeline`.
The names of `__all__` are the public surface; each is imported when it is first used. The docstring of each has an
example that needs no TVM and no hardware; `tvm_pipeline.testing` has the small network that the examples share.
`import *` also brings `compile` and `open`, which hide Python's own. The rooms, from the ground up:

version.py   the version of this package
errors.py    the errors a user can meet, as one tree
addresses.py  addresses of cameras and brokers, shown without their secrets
option_names.py  the names of settings on the command line and in files
signals.py   the requests of signals
files.py     reading and writing files, with errors that name them
plugins.py   what installed packages add to the engine's tables, by entry points
processes.py  child processes: started, talked to, waited for with limits, ended with their parent
documents.py  JSON, TOML and text of others: what is wrong is said with the file
system_files.py  small files of the kernel and of the system, none of which must be there
core/        the vocabulary: graph, platform, profile, problem, plan
solvers/     tools that the searches of several rooms share
memory/      the order of operators that needs the least memory
power/       the doors for sensors and power modes, and the joules between two moments
cost/        what a plan costs: its seconds, bytes and joules
planning/    from a Problem to a Plan with its bound
backends/    the contract of a hardware family, and the registry of those installed
frontends/   model files become Models
profiling/   operators and links measured
calibration/  the model of a device refitted to measured stages
runtime/     the running pipeline
workflow/    from a model to a plan that runs, as one call each
report/      tables and pictures
testing/     for tests of backends
cli/         the command line
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tvm_pipeline.version import __version__ as __version__

if TYPE_CHECKING:
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
    from tvm_pipeline.workflow.compiled_pipeline import CompiledPipeline, compile, open

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
    "compile",
    "detect_platform",
    "evaluate",
    "graph_from_networkx",
    "load",
    "merge_graphs",
    "open",
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

# The names again, by the module that `__getattr__` imports; type checkers and the pages read the imports above.
_NAMES = {
    "backends.bundle": ("Bundle", "open_bundle", "write_bundle"),
    "backends.registry": ("detect_platform", "settle_platform"),
    "core.graph": ("Operator", "OperatorGraph", "Tensor"),
    "core.graph_files": ("graph_from_networkx", "merge_graphs", "read_graph"),
    "core.model": ("Model",),
    "core.plan": ("Decision", "Plan", "Prediction", "Stage", "read_plan"),
    "core.platform": ("Device", "Link", "Platform", "read_platform"),
    "core.problem": ("Problem",),
    "core.profile": ("DeviceProfile", "Profile", "read_profile"),
    "cost.evaluate": ("Evaluation", "evaluate"),
    "errors": ("PipelineError",),
    "frontends": ("load",),
    "planning": ("plan",),
    "profiling": ("profile_model",),
    "profiling.stage_timer": ("stage_timer",),
    "runtime": ("Pipeline", "Result"),
    "workflow.compiled_pipeline": ("CompiledPipeline", "compile", "open"),
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that `import tvm_pipeline` loads nothing else."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
