"""Local search for plans of graphs whose downsets are too many to list, and bounds of all plans of such graphs.

local_search.py   the scheduler `local-search`: which runs get the time, and the plan
graph_arrays.py   the graph as arrays
device_arrays.py  the devices as arrays
starts.py         first plans: orders, cut
annealing.py      the loops that improve them
"""
