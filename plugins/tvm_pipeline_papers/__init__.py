"""Algorithms of papers to compare the engine with: schedulers, strategies, a command, and others for benchmarks.

algorithm_1.py        the scheduler `algorithm-1`: Algorithm 1 of Velasco-Montero et al., as it is printed
balance.py            the strategy `balance`: one operator at a time moves to the faster stage
line_search.py        the strategy `line-search`: Algorithm 2 of Velasco-Montero et al., trials of one cut after another
all_cuts.py           the command `all-cuts`
every_cut.py          every cut in two on two devices, to be measured
measured_cuts.py      every cut in two, measured beside its prediction
cut_tables.py         that comparison as a table and as a picture
coral.py              libcoral's partitioners, the schedulers `coral-parameters` and `coral-profiling`
learned/              the schedulers `respect`, `predpar` and `pred-profpar`, which were trained
serenity.py           SERENITY's scheduler of the operators of a device by their memory
set_costs.py          pipelines where the cost of a stage is any function of its operators
fewest_bottleneck.py  the same for segments of one order, with few questions
peak_distribution.py  how many orders of a graph have which peak of memory
tflite_arena.py       the arena that TensorFlow Lite laid out in 2019
dnn_partitioning.py   the instances of dnn-partitioning, and their best split under its cost model
dnn_inference.py      those for the latency of one sample: splits, judged, and sets of nodes
dnn_latency.py        the split with the least latency, and bounds along paths
dnn_blocks.py         bounds of the latency where all paths meet again and again
better_together.py    measurements of BetterTogether's boards, and its pipelines predicted by the engine's model
minimalloc.py         the file format of Google's minimalloc
"""
