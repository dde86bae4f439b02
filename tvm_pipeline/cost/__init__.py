"""What a plan costs: its seconds, bytes and joules.

evaluate.py   the judge: a plan's figures, recomputed from the graph, the platform and the profile alone
simulate.py   a plan run as discrete events
"""
