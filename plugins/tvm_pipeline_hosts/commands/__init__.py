"""The commands of this package: a thin file for each.

serve_rpc.py     this machine as a board
fleet.py         the group of the commands below
fleet_plan.py    which host takes which camera
fleet_up.py      the head of a fleet
fleet_join.py    this machine as a host
fleet_run.py     the cameras of a file on the hosts that have joined
fleet_status.py  the hosts and cameras as they are now
fleet_top.py     the same once a second
"""
