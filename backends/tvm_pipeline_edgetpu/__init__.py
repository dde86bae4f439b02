"""Coral Edge TPUs: TFLite files cut into the sub-models that each device runs.

`model.py` reads and checks a .tflite and gives its operator graph, `work.py` says how much an operator computes, and
`slicer.py` cuts it. All three need the package ai-edge-litert, the extra `edgetpu`; none needs TVM.
"""
