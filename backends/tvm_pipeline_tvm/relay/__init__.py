"""Relay and the graph executor that it compiles for: models compiled and cut by TVM 0.19.

Relay's IR and its passes:

importer.py            a Model becomes a Relay module
import_folding.py      its constants are folded in numpy while TVM's importer runs
onnx_repairs.py        what TVM's importer of ONNX gets wrong, repaired or refused
output_names.py        the names of a module's outputs, which every pass keeps
tflite_repairs.py      converters of TFLite operators that TVM's importer lacks
fold.py                constants are folded in numpy, which makes building several times faster
infer_once.py          types are inferred once for each function
fold_table.py          what numpy computes of Relay's operators
reference.py           what a module computes in float64, and how far a library is from it
child.py               a compile in a process of its own, which TVM or LLVM may end
topi.py                functions of ours in the place of TOPI's while a build runs
distinct_outputs.py    each output of a model is a tensor of its own
channels_first.py      images are stored channels first, as fast convolutions read them
pad_channels.py        convolutions get as many channels as fill vectors
int8.py                products of int8 that build and are exact on every x86
refused_lets.py        values that LLVM refuses under a name stand where they are used
concatenations_apart.py  concatenations are kernels of their own, which slices do in place
splits.py              splits that may stand between blocked layouts
kernel_walkers.py      two walkers: the kernels of a library, and those of a fused module
macs.py                names and work of Relay operators
extraction.py          the pass ExtractOperatorGraph
partition_pipeline.py  the pass PartitionPipeline
memory_order.py        the pass MemoryOrder
rewrite_concat.py      the pass RewriteConcat

The graph executor's, which only `relay.build` serves (a second IR brings its own):

work_done.py           how much of an import or a compile is done, and how long the rest may take
library.py             what one compilation gives, in memory and as files
build.py               a module becomes a Library for one target, kept in a cache
overwriting_record.py  what the results of a library's kernels may overwrite, kept with it
saved_params.py        the parameters of a library, mapped from a file
slicing.py             a planned slice of a library becomes graph JSON
executor.py            a slice that runs on CPU cores
stack_placement.py     the depth of the stack at which kernels are called
device_executor.py     a slice that runs on a device with memory of its own
compiled.py            the compiled model, on `compiled_model.py`

An import of this package without Relay raises an ImportError that says what to install.
"""

from tvm_pipeline_tvm.installed_ir import demand

demand("relay")
