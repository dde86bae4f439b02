"""The backend that compiles by TVM: for CPU cores (`host/`) and GPUs (`gpu/`), through Relay or Relax.

relay_passes.py     the passes for TVM scripts, on modules of Relay
relax_passes.py     the same on modules of Relax

installed_ir.py     which TVM is installed, and so which IR compiles
kernel_sets.py      the door for kernels that are faster than TVM's own
kernels.py          the vocabulary: kernels, their outputs and entries
numbering.py        each operator of a library gets the same number in every library of the model
alignment.py        the kernels of several libraries become one operator graph
overwriting.py      which arguments a kernel may overwrite with its result, proven on its TIR
tir_numbers.py      indices of lowered TIR as numbers
slice_plan.py       which kernels a slice runs, and where each tensor lies
shared_bytes.py     which tensors of a slice lie inside others, so that nothing copies them
compiled_model.py   one library for each target under one operator graph, cut into stages
agreement.py        the libraries of one model compute the same, which is checked when it is compiled
concatenations.py   which concatenations can be done in parts, and how their readers are cut
padded_channels.py  which convolutions get more output channels
kernel_order.py     the order of kernels that needs the least memory
weights_file.py     weights as a file that every process maps
child_process.py    a process for what may end it, or hang in it, and threads that can be stopped
library_cache.py    one process compiles a library, others wait for it, and damaged ones are compiled anew
machine_code.py     which processor the code of a library is for
linking.py          compiled code becomes a shared library, for this machine's processor or another
rpc_clients.py      TVM's own clients of RPC at the port of a board
target_text.py      the target of a device as TVM's own, and which processor it is for
tflite_walk.py      what TVM cannot import of a TFLite file, by the names of the file
mediapipe.py        MediaPipe's custom operator of TFLite files
tvm_errors.py       what TVM raises, and the reason in its messages
float64.py          layers in float64, against which the error of kernels is measured
numpy_rules.py      what numpy computes of the operators that Relay and Relax have alike
host/               the backend of CPU cores: it finds, compiles and binds
gpu/                the backend of GPUs
devices/            devices with memory of their own: CUDA and OpenCL
relay/              Relay and the graph executor it compiles for
relax/              Relax, today's IR of TVM, whose slices are loops over compiled functions

An environment has Relay or Relax, and what stands beside `relay/` and `relax/` knows neither. An import of this package
sets TVM's environment up, so it comes before `import tvm`.
"""

import logging
import os

from tvm_pipeline.files import cache_folder

# Without this every build looks for tuned schedules on the network. TVM reads it when it is imported.
os.environ.setdefault("TOPHUB_LOCATION", "NONE")
# How often a thread of a pool looks for work before it sleeps. TVM's own 300 000 times are 0.1 s on an idle core, and
# many seconds on a busy one, as each look gives the core away. Pools of stages that have ended, and those that wait for
# a frame, would take the cores from others: 1000 times are longer than the gaps between kernels.
os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "1000")
# TVM makes this folder when it is imported; without this line it is below the home of the user, and a service has none.
os.environ.setdefault("TEST_DATA_ROOT_PATH", str(cache_folder() / "tvm"))
if os.path.expanduser("~") == "~":  # a user without an entry in the password file: TVM names files of the home, too
    os.environ["HOME"] = os.environ["TVM_PIPELINE_CACHE"] = str(cache_folder())

_logged: set[str] = set()


def _is_new(record: logging.LogRecord) -> bool:
    """Return True for the first record of a message: TVM logs the same one for each of a hundred convolutions."""
    message = record.getMessage()
    is_known = message in _logged
    _logged.add(message)
    return not is_known


logging.getLogger("strategy").addFilter(_is_new)
