"""The backend of onnxruntime: ONNX models, or what TVM refuses of one, on CPU cores and by execution providers.

onnxruntime.py        the backend: its devices, and what it refuses
sessions.py           a session on some cores or by a provider, and the child that tries what a provider claims
onnxruntime_model.py  a model compiled for it: any part of the file as a runnable stage, and the times of its operators

This package can be imported without onnxruntime, so that nobody is told of it who does not need it. A device of it
cannot be used then, and the error says what to install.
"""

from tvm_pipeline_onnxruntime.onnxruntime import OnnxruntimeBackend

backend = OnnxruntimeBackend()

__all__ = ["OnnxruntimeBackend", "backend"]
