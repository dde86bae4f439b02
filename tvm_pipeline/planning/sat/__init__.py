"""Exact searches by constraint programming (OR-tools' CP-SAT).

cp_sat.py         the scheduler cp-sat
staging.py        variables: the stage of each operator
placement.py      variables: the device of each stage, and the loads of the devices and buses
least_seconds.py  the model for throughput, latency and energy
least_bytes.py    the model for objectives of bytes
"""
