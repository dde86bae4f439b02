"""The vocabulary: what is planned, on what, by which figures, and what comes of it. No TVM, no solver.

graph.py          the operator graph, its edges, and the tensors that cross a cut
topology.py       Kahn's algorithm on graphs of indices
partition.py      which groups of operators are legal stages
graph_files.py    graphs from files and from networkx
tensor_layout.py  blocked layouts of tensors, such as NCHW16c, and copies between them
platform.py       the devices and links of a machine
profile.py        what was measured of a graph on a platform
problem.py        what a planner is given: graph, platform, profile, objective and limits
plan.py           the Plan that solves a Problem, with its predicted figures
model.py          a network as its file gave it
statistics.py     what a run measured
state.py          the state of a running pipeline, as it is sent to those who watch it
"""
