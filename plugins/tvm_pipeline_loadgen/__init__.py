"""MLPerf LoadGen drives a pipeline, and says whether its result is valid.

under_test.py   a running pipeline, or an engine beside it, as LoadGen's system under test
scenarios.py    one test of LoadGen: its settings, its logs and its verdict
compliance.py   MLCommons' compliance tests TEST01 and TEST04
commands/       `tvm-pipeline loadgen`

It comes in by the entry point of its command, and needs the extra `loadgen`.
"""
