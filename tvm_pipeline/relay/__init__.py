"""All that touches Relay. Nothing outside this room and the backends imports TVM.

importer.py    a Model becomes a Relay module
fold.py        constants are folded in numpy, which makes building several times faster
build.py       a module becomes a Library for one target, kept in a cache
kernels.py     what the kernels of a library, or of a fused module, compute and read
alignment.py   the kernels of several libraries become one operator graph
slicing.py     some operators of a library become a slice of its graph
ordering.py    kernels in the order of least memory; the pass MemoryOrder
executor.py    a slice that runs
extraction.py  the pass ExtractOperatorGraph
partition.py   the pass PartitionPipeline
rewriting.py   the pass RewriteConcat
"""

import logging
import os

# Without this every build looks for tuned schedules on the network; read when TVM is imported.
os.environ.setdefault("TOPHUB_LOCATION", "NONE")

try:
    from tvm import relay  # noqa: F401
except ImportError as error:
    raise ImportError(
        "TVM with Relay is not installed: run `pip install 'tvm-pipeline[relay]'`, or bring your own build of TVM 0.19"
    ) from error

_said: set[str] = set()


def _new(record: logging.LogRecord) -> bool:
    """Lets a message through once: TVM has the same one for each of a hundred convolutions."""
    message = record.getMessage()
    known = message in _said
    _said.add(message)
    return not known


logging.getLogger("strategy").addFilter(_new)
