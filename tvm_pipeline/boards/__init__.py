"""The board that this is: which Jetson; its power modes.

modules.py       the table of known Jetson modules
jetson.py        which module, JetPack and power mode this is
nvpmodel.py      the power modes of a Jetson, from nvpmodel.conf, and the program that sets them
clock_limits.py  the greatest frequencies of CPU cores, the GPU and other devfreq devices
mode_record.py   what was before a mode was set, in a file that outlives a process which is killed
mode_switch.py   the power modes of this machine: which it has, one while a block lasts, putting back what was left

No Jetson was at hand: all of this was run on trees of files, made as public sources document them (`docs/jetson.md`).
"""

from tvm_pipeline.boards.jetson import Jetson, board_environment, read_jetson

__all__ = ["Jetson", "board_environment", "read_jetson"]
