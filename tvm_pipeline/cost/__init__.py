"""The costs of plans: their seconds, bytes and joules.

device_costs.py    the one source of costs: what a stage costs on a device
modelled_stage.py  the seconds of stages by the model of a device alone
stage_table.py     the formula of a stage's cost for the searches, and the figures of devices as arrays
evaluate.py        the one judge: the figures of a plan, from the graph, the platform and the profile alone
batches.py         calls that compute several frames: searched as calls, told as frames
stage_costs.py     the seconds of stages on their devices
shares.py          how replicas share the frames of a stage
whole_stages.py    measured stages against their operators, for bounds
uncertainty.py     how far a prediction may be off
shapes.py          what the shapes of an operator tell of its work
busy_energy.py     the joules of a frame by a platform's watts, where no sensor measures them
frame_time.py      where the time of a frame goes on each device
scaling.py         problems and profiles as they would be if devices or operators took other seconds
simulate.py        a plan run as discrete events
under_load.py      the latency of frames under load, by the measured times of stages, and the plan that keeps a deadline
"""
