"""Several models on one platform: what judges, starts, bounds and proves their deployment.

deployment_judge.py   the utilisation of every device, and the memory that all models need there
model_figures.py      the models and the devices as arrays
deployment_loops.py   the loops that move cuts and devices of all models, and that cut one anew beside the others
first_deployment.py   a first deployment of any size, by these loops
load_bound.py         a bound of all deployments, by the least load of each model
placed_together.py    the exact model of CP-SAT
"""
