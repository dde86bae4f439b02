"""The backend of Coral Edge TPUs and of TFLite: .tflite models over several of them, and over other backends.

edgetpu.py      the backend: it finds devices, and chooses stand-ins for absent ones
compiled.py     a model compiled for Edge TPUs: any slice of the file as a runnable stage
model.py        reads a .tflite as an operator graph
work.py         the work of each operator
slicer.py       cuts the file into one file for each stage
ordering.py     puts the operators of a file into the order of least memory
in_parts.py     does the concatenations of a file in parts
support.py      the operators that an Edge TPU takes
versions.py     gives edgetpu_compiler the versions of operators that it knows
compiler.py     calls Google's edgetpu_compiler
delegate.py     finds Edge TPUs and loads libedgetpu
external.py     finds out what a vendor's delegate of TFLite computes, and loads it
interpreter.py  runs a file
byoc.py         `relay.ext.edgetpu`: regions of a Relay module on Edge TPUs
byoc_relax.py   the same of Relax
invoking.py     what the code of both calls
patterns.py     the Relay patterns of the operators in such regions

An import of this package without TFLite raises an ImportError that says what to install.
"""

from importlib.util import find_spec

from tvm_pipeline_edgetpu.edgetpu import EdgeTpuBackend

if find_spec("ai_edge_litert") is None:
    raise ImportError("TFLite is not installed: run `pip install 'tvm-pipeline[edgetpu]'`")

backend = EdgeTpuBackend()

__all__ = ["EdgeTpuBackend", "backend"]
