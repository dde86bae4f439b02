"""The vocabulary: graphs, platforms, profiles, problems, plans and statistics. No TVM, no solver.

graph.py          the operator graph, its edges, and the tensors that cross a cut
graph_limits.py   the figures that a graph may have
number_types.py   the types of numbers: numpy's, and narrow ones of ml_dtypes
state_loops.py    the graph of a model whose state goes from frame to frame
topology.py       Kahn's algorithm on graphs of indices
partition.py      the check that groups of operators are legal stages
graph_files.py    graphs from files and from networkx
tensor_layout.py  blocked layouts of tensors, such as NCHW16c, and copies between them
platform.py       the devices and links of a machine
device_model.py   a model of a device's speed
platform_text.py  a platform as the text of a file
power_mode.py     what a machine can be set to: clocks, cores, power
in_mode.py        a platform in one of its power modes
profile.py        the measured figures of a graph on a platform
problem.py        the Problem of a planner: graph, platform, profile, objective and limits
instance.py       a Problem and the best plan that is known of it, in a file
plan.py           the Plan that solves a Problem, with its predicted figures
model.py          a network's file, read and checked
deadline.py       a limit of time for work on a file that somebody else made
statistics.py     the figures that a run measures
frame_energy.py   the joules of a frame, and who says so
"""
