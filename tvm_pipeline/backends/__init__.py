"""The contract between the core and the backends, and what every backend needs.

The names below are what a backend imports.

contract.py          what a backend, its models and its stages are; read it first
ports.py             how tensors lie in host memory where they enter or leave a stage
cores.py             the processor, the check of a device's CPU cores, and threads that keep to them
registry.py          installed backends, the devices they find, and which of them compiles for a platform
sliced.py            several backends on one platform: one cuts the model's file, and all compile slices of it
carried.py           a compiled model whose state goes from frame to frame
batched.py           a compiled model whose calls compute several frames
stage_process.py     a stage in a process of its own
engine.py            the bases of an engine's backend, of its models and of its stages
trial.py             a child that loads an engine first
engine_targets.py    targets of engines, and options by their properties
engine_words.py      what an engine's native code writes to standard output and error
operator_timing.py   seconds of operators that run as stages of their own
engine_agreement.py  whether engines compute the same
closeness.py         how far the results of two processors may be apart
archive.py           tar files from strangers, found without trusting a header
bundle.py            a compiled model, its profile and its plan in one file
"""

from tvm_pipeline.backends.contract import (
    Array,
    Backend,
    CompiledModel,
    Delegating,
    ModelSlice,
    Order,
    Port,
    Seconds,
    Slicer,
    StageRunner,
)

__all__ = [
    "Array",
    "Backend",
    "CompiledModel",
    "Delegating",
    "ModelSlice",
    "Order",
    "Port",
    "Seconds",
    "Slicer",
    "StageRunner",
]
