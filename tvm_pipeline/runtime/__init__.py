"""The running pipeline.

frame_stream.py    the interface of every running pipeline: submit, result, map, results, drain, stop
pipeline.py        Pipeline: one plan that runs
host_work.py       operators of an application around its model's
carried_state.py   the state that goes from frame to frame
worker.py          the thread of one stage on one device
slots.py           the buffers of a frame on its way, and how each worker sees them
isolation.py       stages in processes of their own
live_pipeline.py   LivePipeline: a plan that is exchanged while it runs, also because a device fails
generations.py     the pipelines of an exchange of plans, oldest first
freed_memory.py    memory that ended plans have freed goes back to the system
strategy.py        the base of the strategies of adaptation: how slow each device is now
adaptation.py      the strategy `replan`: another plan if it is worth a change; the table of strategies
replanning.py      planning while a pipeline runs, in milliseconds
comparison.py      plans that run side by side, predicted against measured
metering.py        the joules of a frame, of plans in turns and of runs that last
verification.py    the choice among candidates by running them, where predictions cannot decide
"""

from tvm_pipeline.core.statistics import RunStatistics, StageRecord, StageStatistics
from tvm_pipeline.runtime.adaptation import STRATEGIES, Adaptation
from tvm_pipeline.runtime.frame_stream import Result
from tvm_pipeline.runtime.live_pipeline import Event, LivePipeline
from tvm_pipeline.runtime.pipeline import Pipeline
from tvm_pipeline.runtime.replanning import judged_now, unlimited
from tvm_pipeline.runtime.strategy import COLD_FRAMES, WINDOW_S, Strategy

__all__ = [
    "COLD_FRAMES",
    "STRATEGIES",
    "WINDOW_S",
    "Adaptation",
    "Event",
    "LivePipeline",
    "Pipeline",
    "Result",
    "RunStatistics",
    "StageRecord",
    "StageStatistics",
    "Strategy",
    "judged_now",
    "unlimited",
]
