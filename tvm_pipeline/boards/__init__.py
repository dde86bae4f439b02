"""The board that this is: which Jetson, its cores, its clocks and its heat; its power modes.

system_files.py  small files of the kernel and of the system, none of which must be there
core_kinds.py    kinds of cores, and cores that are switched off
clocks.py        the present clocks of the cores and of the GPU, and their limits
modules.py       the table of known Jetson modules
jetson.py        which module, JetPack and power mode this is
nvpmodel.py      the power modes of a Jetson, from nvpmodel.conf, and the program that sets them
clock_limits.py  the greatest frequencies of CPU cores, the GPU and other devfreq devices
mode_record.py   what was before a mode was set, in a file that outlives a process which is killed
mode_switch.py   a power mode while a block lasts, and putting back what a killed process left
throttling.py    tells when the clocks are lowered because of heat or current, and when that ends

No Jetson was at hand: all of this was run on trees of files, made as public sources document them (`docs/jetson.md`).
"""

from tvm_pipeline.boards.jetson import Jetson, board_environment, read_jetson
from tvm_pipeline.boards.throttling import ThrottleWatch

__all__ = ["Jetson", "ThrottleWatch", "board_environment", "read_jetson"]
