"""The backend of OpenVINO: ONNX models, or parts of them, on CPU cores and on Intel's GPUs and NPUs.

openvino.py        the backend: its devices, and what it refuses
openvino_model.py  a model compiled for it: any part of the file as a runnable stage, and the times of its layers
refused.py         what OpenVINO computes otherwise than ONNX says, and is not given
stages.py          a part of a file as OpenVINO compiles it: the only place that imports OpenVINO

This package can be imported without OpenVINO. A device of it cannot be used then, and the error says what to install.
"""

from tvm_pipeline_openvino.openvino import OpenvinoBackend

backend = OpenvinoBackend()

__all__ = ["OpenvinoBackend", "backend"]
