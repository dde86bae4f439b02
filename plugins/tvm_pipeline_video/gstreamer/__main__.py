"""Prints the settings of a shell in which GStreamer finds the element."""

import os
import shlex
import sys
import sysconfig
from pathlib import Path

for name, path in (
    ("GST_PLUGIN_PATH", str(Path(__file__).parent)),
    ("PYTHONPATH", sysconfig.get_path("purelib")),
):
    sys.stdout.write(f"export {name}={shlex.quote(':'.join(filter(None, [path, os.environ.get(name)])))}\n")
