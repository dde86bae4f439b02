"""A board from here: what is compiled on a workstation is measured and run on a board, over one connection.

board.py        the client: connect to a board, call it, send it a bundle
address.py      the address of a board
dialing.py      a connection to a board, and why there is none
channel.py      frames in order and once each, over links that come and go
frames.py       a frame on a socket: a header and arrays
told_errors.py  errors that cross a connection
parcels.py      bundles in parts, by their sums
methods.py      what can be called on a board
remote_backend.py  devices of other hosts in one pipeline
remote_stages.py   what a host does for such a pipeline
board_measuring.py  what a board measures of a bundle that was sent
board_check.py  a model on a board against the same model here
board_models.py  a model that is compiled here for a board: its targets, its bundle, its outputs
remote_machine.py  a board as the machine that a model is compiled for
greetings.py    how a connection to the server begins: as a client of ours, one of TVM's, or a stranger
session.py      the process on the board that does what a client calls
serving.py      the server on the board: one client at a time, and a process for each session
"""
