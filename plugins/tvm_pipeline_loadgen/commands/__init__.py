"""The command of the plug-in.

loadgen.py  `tvm-pipeline loadgen`
"""
