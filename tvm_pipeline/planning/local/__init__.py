"""Local search for plans of graphs whose downsets are too many to list, and bounds of all plans of such graphs.

local_search.py    the scheduler `local-search`: which runs get the time, and the plan
problem_arrays.py  the graph and the devices as arrays
furthest_cuts.py   first plans: stages that reach as far as they can
annealing.py       the state of a search, what it minimises, and the loops that improve it
bounds.py          the bound of all plans
least_load.py      what every plan costs at least: operators, calls, first inputs, last outputs, fetches
chain_bound.py     pipelines whose cuts do not contain one another: a bound with transfers
cut_flow.py        minimum cuts of one graph again and again, with other operators fixed
least_crossing.py  the least bytes that cross a cut, by minimum cuts in windows of work
refined_chain.py   the bound of pipelines that branching over minimum cuts tightens, and the plans that its cuts make
"""
