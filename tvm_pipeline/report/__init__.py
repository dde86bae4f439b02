"""Tables and pictures of plans and runs, for people. Nothing here decides anything.

tables.py         the candidates, the devices, the stages, predicted beside measured; printed by rich
gantt.py          which device works on which frame, and when
frame_bars.py     where the time of a frame goes
drawing.py        the operator graph, coloured by stage, with its cuts
layered.py        where the operators of that drawing stand
memory_tables.py  the memory that orders of operators need, what is alive at the peak, memory over time
parts_tables.py   what is done in parts to save memory, and what that saves
markdown.py       all of it in one file, with the commands that repeat it

Pictures need matplotlib (`pip install 'tvm-pipeline[plot]'`), which is imported when the first is drawn.
"""

from tvm_pipeline.core.statistics import Bar
from tvm_pipeline.report.drawing import check_picture, draw_graph
from tvm_pipeline.report.frame_bars import draw_frame_time
from tvm_pipeline.report.gantt import DRAWN_FRAMES, draw_gantt, first_frames, measured_frames
from tvm_pipeline.report.markdown import write_report
from tvm_pipeline.report.memory_tables import (
    alive_at,
    draw_memory,
    orders_table,
    peak_table,
    stage_memories,
    stages_memory_table,
)
from tvm_pipeline.report.tables import (
    TextTable,
    candidates_table,
    comparison_table,
    devices_table,
    duration,
    in_units_of,
    joules_table,
    sensors_table,
    size,
    stages_table,
    statistics_table,
)

__all__ = [
    "DRAWN_FRAMES",
    "Bar",
    "TextTable",
    "alive_at",
    "candidates_table",
    "check_picture",
    "comparison_table",
    "devices_table",
    "draw_frame_time",
    "draw_gantt",
    "draw_graph",
    "draw_memory",
    "duration",
    "first_frames",
    "in_units_of",
    "joules_table",
    "measured_frames",
    "orders_table",
    "peak_table",
    "sensors_table",
    "size",
    "stage_memories",
    "stages_memory_table",
    "stages_table",
    "statistics_table",
    "write_report",
]
