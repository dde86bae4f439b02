"""Baselines: plans without a proof, to compare the exact searches with.

whole_model.py  one device, or replicas of the whole model or of what stands between ordered operators
segments.py     segments of the graph's own order: of equal parameter bytes, and filled in turn
"""
