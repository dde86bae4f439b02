"""The commands of the plug-in.

run.py     `tvm-pipeline run`
serve.py   `tvm-pipeline serve`
top.py     `tvm-pipeline top`
arrays.py  arrays of NumPy in place of video
screen.py  the terminal as a listener of a run
"""
