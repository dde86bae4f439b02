"""The running pipeline.

pipeline.py    Pipeline: start, submit, results, map, drain, stop
worker.py      the thread of one stage on one device
slots.py       the buffers of a frame on its way, and how each worker sees them
statistics.py  what was measured while it ran
"""

from tvm_pipeline.runtime.pipeline import Pipeline, Result
from tvm_pipeline.statistics import RunStatistics, StageStatistics

__all__ = ["Pipeline", "Result", "RunStatistics", "StageStatistics"]
