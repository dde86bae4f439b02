"""Relax, the intermediate representation of TVM since 0.20: models compiled and cut by apache-tvm 0.27.

From a file to a plain module:

importer.py           a Model becomes a Relax module
integer_layers.py     quantised layers in integers, and in bytes what only moves numbers between them
onnx_importer.py      an ONNX graph, node by node: constants folded, shapes known
onnx_functions.py     nodes that TVM has not, as those by which ONNX defines them
onnx_nodes.py         nodes that TVM's converters read wrongly, rewritten
onnx_site.py          a node, and what is known around it
onnx_resizing.py      Resize and Upsample, by matrices where TVM computes other scales
onnx_recurrent.py     LSTM, GRU and RNN step by step
onnx_converters.py    operators of Relax for nodes that TVM imports as functions of TIR
onnx_quantized.py     quantised nodes as float operators between their roundings
tflite_importer.py    a TFLite file
channels_first.py     pictures channels first, where a file has them last
distinct_outputs.py   each output of a model is a tensor of its own
dataflow.py           read a function that is one block of dataflow
rule_rewriting.py     write such a function anew by rules
simplify.py           constants are folded in numpy, batch norms become part of convolutions
scale_folding.py      factors move into weights
numpy_table.py        what numpy computes of Relax's operators
pad_channels.py       convolutions get as many channels as fill vectors
rewrite_concat.py     the pass RewriteConcat, and a model with concatenations in parts, before it is compiled

From a plain module to kernels:

gpu_schedules.py      schedules for GPUs: those that are installed, TVM's of the rest
kernel_passes.py      the passes in their order
reference.py          what a module computes in float64, and how far a library is from it
kernel_walkers.py     the kernels of a module: what each computes, and on what
build.py              a module becomes a Library for one target, kept in a cache
cuda_kernels.py       compile kernels for CUDA devices
opencl_kernels.py     compile kernels for OpenCL devices, and build their programs

What runs:

call_loop.py          a slice that runs on CPU cores: a loop over compiled functions
device_loop.py        a slice that runs on a device with memory of its own: what all have in common
device_bench.py       functions on such a device by themselves, for tuning
cuda_loop.py          such a slice on a CUDA device
opencl_loop.py        and on an OpenCL device
compiled.py           one library for each target under one operator graph

Passes for scripts (`tvm_pipeline_tvm.relax_passes` gathers them):

extraction.py         the pass ExtractOperatorGraph
partition_pipeline.py  the pass PartitionPipeline
memory_order.py       the pass MemoryOrder
"""

from tvm_pipeline_tvm.installed_ir import demand

demand("relax")
