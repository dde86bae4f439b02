"""A decoder that is watched: how long has it been at its frame?

Read next: running_model.py, which gives a decoder up that does not return.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import update_wrapper

from tvm_pipeline_video.service.video_extra import Annotation, Decoder, Outputs, Transform, decoder_name


class TimedDecoder:
    """A decoder that tells for how many seconds it has been at its frame."""

    def __init__(self, decode: Decoder) -> None:
        update_wrapper(self, decode)
        self.name = decoder_name(decode)
        self._decode, self._since_s = decode, math.inf

    def __call__(self, outputs: Outputs, transform: Transform) -> Sequence[Annotation]:
        self._since_s = time.perf_counter()
        try:
            return self._decode(outputs, transform)
        finally:
            self._since_s = math.inf

    @property
    def busy_s(self) -> float:
        """Return the seconds, 0 or less where it is at none."""
        return time.perf_counter() - self._since_s
