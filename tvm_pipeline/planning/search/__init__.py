"""Exact searches by dynamic programming over the cuts of a graph.

cuts.py                 the cuts of a graph: its downsets, or the prefixes of one order
space.py                the pipelines that a search considers, its states, and the stages that lead from one to the next
cost_tables.py          the costs of stages as arrays over cuts
dynamic_programming.py  the schedulers chain, ideals and hybrid
pipelines.py            the search for the least bottleneck and for the least sum
loops.py                its compiled loops
relaxation.py           its lower bound, and the windows of cuts that can matter
lexicographic.py        the search for the objectives of bytes
revisits.py             pipelines whose devices serve several stages
work_bound.py           a bound of all plans, whatever stages their devices share
pareto.py               throughput against latency and energy
with_activations.py     the bytes that stages hold with their activations
"""
