"""The application that runs a bundle on sources of frames, for weeks if need be.

settings.py    the options of a run
file.py        the options of a run, from a TOML file
feeds.py       sources of frames, and how far a run has come
running.py     one run, from the bundle to the last record
records.py     results and events as lines of JSON
control.py     commands to a running process
supervisor.py  a parent that starts the run again after a crash
"""
