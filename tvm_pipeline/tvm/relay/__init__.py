"""What is Relay's: models compiled and cut by TVM 0.19.

importer.py            a Model becomes a Relay module
fold.py                constants are folded in numpy, which makes building several times faster
build.py               a module becomes a Library for one target, kept in a cache
kernels.py             what the kernels of a library, or of a fused module, compute and read
macs.py                how much one Relay operator computes
slicing.py             some operators of a library become a slice of its graph
memory_order.py        kernels in the order of least memory; the pass MemoryOrder
executor.py            a slice that runs
compiled.py            one library for each target under one operator graph
extraction.py          the pass ExtractOperatorGraph
partition_pipeline.py  the pass PartitionPipeline
rewrite_concat.py      the pass RewriteConcat
"""

try:
    from tvm import relay  # noqa: F401
except ImportError as error:
    raise ImportError(
        "TVM with Relay is not installed: run `pip install 'tvm-pipeline[relay]'`, or bring your own build of TVM 0.19"
    ) from error
