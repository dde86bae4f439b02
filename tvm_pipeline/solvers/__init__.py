"""Tools that the searches of several rooms share.

cpsat.py   one call of OR-tools' CP-SAT
hot.py     functions that numba compiles at their first call
"""
