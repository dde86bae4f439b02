"""What tvm-pipeline knows of boards: their sensors of power, which Jetson this is, and its power modes.

The engine finds the sensors and the modes through entry points: `machine_sensors` and `BoardModes`.

machine_sensors.py  the sensors of this machine
hwmon.py            INA3221 and other chips, the rails of Jetson boards
rapl.py             counters of Intel's and AMD's processors
nvml.py             NVIDIA's GPUs
jtop.py             the service of that name on a Jetson
figure_files.py     figures that the kernel tells in files, and why it does not
mode_switch.py      the power modes of this machine: which it has, one while a block lasts, putting back what was left
mode_record.py      what was before a mode was set, in a file that outlives a process which is killed
nvpmodel.py         the power modes of a Jetson, from nvpmodel.conf, and the program that sets them
clock_limits.py     the greatest frequencies of CPU cores, the GPU and other devfreq devices
jetson.py           which module, JetPack and power mode this is
modules.py          the table of known Jetson modules

This code never ran on a Jetson. Its tests use trees of files, made as public sources document them (`docs/jetson.md`).
"""
