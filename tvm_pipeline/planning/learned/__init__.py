"""Schedulers that were learned, to compare with; their networks are computed with numpy from weights that are shipped.

weights.py  files of weights: their purpose, version, origin and hash
"""
