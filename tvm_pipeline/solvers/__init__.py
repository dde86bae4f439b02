"""Tools that the searches of several packages share.

cpsat.py   one call of OR-tools' CP-SAT
hot.py     functions that numba compiles at their first call
"""
