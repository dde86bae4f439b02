"""All that touches TVM. Nothing outside this room and the backends imports it.

alignment.py        the kernels of several libraries become one operator graph
stack_placement.py  the depth of the stack at which kernels are called
relay/              what is Relay's
"""

import logging
import os

# Without this every build looks for tuned schedules on the network; read when TVM is imported.
os.environ.setdefault("TOPHUB_LOCATION", "NONE")

_said: set[str] = set()


def _new(record: logging.LogRecord) -> bool:
    """Lets a message through once: TVM has the same one for each of a hundred convolutions."""
    message = record.getMessage()
    known = message in _said
    _said.add(message)
    return not known


logging.getLogger("strategy").addFilter(_new)
