"""The backend of Coral Edge TPUs: int8 TFLite models over several of them, TFLite's CPU kernels, and other backends.

edgetpu.py      the backend: which devices are here, what stands in for those that are not
compiled.py     a model compiled for Edge TPUs: any slice of the file as a runnable stage
model.py        a .tflite read as an operator graph; work.py: how much each operator computes
slicer.py       the file cut into a file for each stage; ordering.py: its operators in the order of least memory
support.py      which operators an Edge TPU takes
compiler.py     Google's edgetpu_compiler; delegate.py: libedgetpu; interpreter.py: a file that runs
byoc.py         `relay.ext.edgetpu`: regions of a Relay module on Edge TPUs; patterns.py: which operators they may be

An import of this package without TFLite raises an ImportError that says what to install.
"""

from importlib.util import find_spec

from tvm_pipeline_edgetpu.edgetpu import EdgeTpuBackend

if find_spec("ai_edge_litert") is None:
    raise ImportError("TFLite is not installed: run `pip install 'tvm-pipeline[edgetpu]'`")

backend = EdgeTpuBackend()

__all__ = ["EdgeTpuBackend", "backend"]
