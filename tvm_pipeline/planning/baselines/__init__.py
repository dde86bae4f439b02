"""Baselines: plans without a proof, to compare the exact searches with.

whole_model.py      one device, or replicas of the whole model
frame_parallel.py   replicas of what stands between ordered operators
algorithm_1.py      Algorithm 1 as it is printed
segments.py         segments of the graph's own order: of equal parameter bytes, and filled in turn
"""
