"""The running pipeline.

stream.py      what every running pipeline offers: submit, result, map, results, drain, stop
pipeline.py    Pipeline: one plan that runs
live.py        LivePipeline: a plan that is exchanged while it runs, and outlives its devices
adaptation.py  how slow each device is now, and whether another plan is worth a change
worker.py      the thread of one stage on one device
slots.py       the buffers of a frame on its way, and how each worker sees them
statistics.py  what was measured while it ran
"""

from tvm_pipeline.runtime.adaptation import Adaptation
from tvm_pipeline.runtime.live import Event, LivePipeline
from tvm_pipeline.runtime.pipeline import Pipeline
from tvm_pipeline.runtime.stream import Result
from tvm_pipeline.statistics import RunStatistics, StageStatistics

__all__ = ["Adaptation", "Event", "LivePipeline", "Pipeline", "Result", "RunStatistics", "StageStatistics"]
