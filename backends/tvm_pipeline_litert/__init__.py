"""The backend of LiteRT's CompiledModel: .tflite models, or parts of them, on CPU cores, GPUs and vendors' NPUs.

litert.py        the backend: its devices
litert_model.py  a model compiled for it: any slice of the file as a runnable stage, which is all that imports LiteRT

This package can be imported without LiteRT. A device of it cannot be used then, and the error says what to install.
"""

from tvm_pipeline_litert.litert import LitertBackend

backend = LitertBackend()

__all__ = ["LitertBackend", "backend"]
