"""The costs of plans: their seconds, bytes and joules.

device_costs.py  the one source of costs: what a stage costs on a device
evaluate.py      the one judge: the figures of a plan, from the graph, the platform and the profile alone
stage_costs.py   the seconds of stages on their devices
shares.py        how replicas share the frames of a stage
uncertainty.py   how far a prediction may be off
busy_energy.py   the joules of a frame by a platform's watts, where no sensor measures them
frame_time.py    where the time of a frame goes on each device
scaling.py       a profile as it would be if operators took another part of their seconds
simulate.py      a plan run as discrete events
"""
