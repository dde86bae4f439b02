"""The contract between the core and the backends, and what every backend needs.

contract.py          the protocols of a backend; read it first
optional.py          what a backend may have beside the contract
ports.py             how tensors lie in host memory where they enter or leave a stage
memory_rewriter.py   what a backend has as well if it can do operators in parts, so that they need less memory
tuning.py            what a backend has as well if it can make its kernels faster by measuring
cores.py             the name of the processor, and the check of a device's CPU cores
registry.py          installed backends, the devices they find, and which of them compiles for a platform
engines.py           backends that run what the backend of the cores refuses
sliced.py            several backends on one platform: one cuts the model's file, and all compile slices of it
carried.py           a compiled model whose state goes from frame to frame
operator_timing.py   seconds of operators that run as stages of their own
closeness.py         how far the results of two processors may be apart
archive.py           tar files from strangers, found without trusting a header
bundle.py            a compiled model, its profile and its plan in one file
"""
