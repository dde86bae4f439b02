"""Tools that the searches of several packages share.

cpsat.py          one call of OR-tools' CP-SAT
ortools_parts.py  parts of OR-tools, imported at the first call
hot.py            functions that numba compiles at their first call
"""
