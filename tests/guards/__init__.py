"""Guards of the structure: tests that read the source and import nothing of it.

sources.py   the files, their syntax trees, their docstrings and what they import
"""
