"""Tools that the searches of several rooms share.

cpsat.py   one call of OR-tools' CP-SAT
hot.py     loops compiled by numba
"""
