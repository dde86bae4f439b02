"""Other machines: a board that is reached from here, and many boards as one fleet.

remote/    a board from here: what is compiled on a workstation is measured and run on a board
fleet/     many boards as one: which host takes which camera, and what happens when one is lost
commands/  `serve-rpc`, and the commands of `fleet`

It comes in by entry points: the machine at an address, the backend `remote`, and its commands.
"""
