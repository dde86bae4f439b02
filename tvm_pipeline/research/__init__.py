"""Algorithms that no command uses. Tests and benchmarks compare the product with them.

set_costs.py          pipelines where the cost of a stage is any function of its operators
fewest_bottleneck.py  the same for segments of one order, with few questions
minimalloc.py         the file format of Google's minimalloc
"""
