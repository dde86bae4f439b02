"""What the core and the backends agree on.

contract.py  the protocols of a backend, and the search for installed backends
bundle.py    a compiled model, its profile and its plan in one file
"""
