"""The running pipeline.

stream.py      what every running pipeline offers: submit, result, map, results, drain, stop
pipeline.py    Pipeline: one plan that runs
live.py        LivePipeline: a plan that is exchanged while it runs, and outlives its devices
events.py      Event: what it decided, and why
strategy.py    how slow each device is now: what every strategy of adaptation knows
adaptation.py  the strategy `replan`: whether another plan is worth a change
hill_climb.py  the strategy `hill-climb`: one operator at a time moves to the faster stage
planning.py    the plan to run now, in milliseconds, and what comes nearest where none keeps the limits
worker.py      the thread of one stage on one device
slots.py       the buffers of a frame on its way, and how each worker sees them
statistics.py  what was measured while it ran
"""

from tvm_pipeline.core.statistics import RunStatistics, StageStatistics
from tvm_pipeline.runtime.adaptation import Adaptation
from tvm_pipeline.runtime.events import Event
from tvm_pipeline.runtime.frame_stream import Result
from tvm_pipeline.runtime.hill_climb import HillClimb
from tvm_pipeline.runtime.live_pipeline import LivePipeline
from tvm_pipeline.runtime.pipeline import Pipeline

__all__ = [
    "Adaptation",
    "Event",
    "HillClimb",
    "LivePipeline",
    "Pipeline",
    "Result",
    "RunStatistics",
    "StageStatistics",
]
