"""A model of a device's speed: a few constants, for a device that was not measured.

`tvm-pipeline calibrate` fits them to measured stages. Next: `platform.py`, whose devices may have a model;
`cost/device_costs.py`, which prices stages by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LONGEST_S = 1e9  # that a figure may state, some thirty years; sums of such figures stay finite
SLOWEST_PER_S = 1e-9  # the least rate, for the same reason


@dataclass(frozen=True, slots=True)
class KindFactor:
    """How many times as long as the roofline says operators of one kind take.

    Attributes:
        name: the kind, one of those of `cost/shapes.py`.
        factor: how many times as long.
    """

    name: str
    factor: float


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A model of a device that was not measured. A stage takes this many seconds:

    `call_s + operators * operator_s + input/input_rate + output/output_rate + max(macs/rate, spilled/refill_rate)`,
    where `spilled` are the bytes of parameters beyond `cached_bytes`, which are fetched for every frame. A rate of None
    costs nothing.

    With `bytes_per_s` it is a roofline, for processors that compute one operator after another: each takes

    `operator_s + factor * max(macs/rate, moved/bytes_per_s)`,

    where `moved` are the bytes that the operator reads and writes, and `factor` is that of its kind in `kind`, else 1.
    These seconds take the place of `operator_s` and of `macs/rate` above.

    Attributes:
        macs_per_s: multiply-accumulates a second.
        call_s: seconds of a call of the device, whatever the stage.
        operator_s: seconds of each operator besides its work.
        input_bytes_per_s, output_bytes_per_s: rates of the tensors that come in and go out.
        cached_bytes: parameters that stay on the device from frame to frame.
        refill_bytes_per_s: the rate of the parameters beyond these.
        bytes_per_s: the rate of memory, which makes the model a roofline.
        kind: factors of kinds of operators.
        error: of a model that was calibrated (`tvm-pipeline calibrate`): the mean of |predicted - measured| / measured
            over stages that were left out of the fit.

    Roofline: Williams, Waterman and Patterson, Communications of the ACM 52(4), 2009.
    """

    macs_per_s: float | None = None
    call_s: float = 0.0
    operator_s: float = 0.0
    input_bytes_per_s: float | None = None
    output_bytes_per_s: float | None = None
    cached_bytes: int | None = None
    refill_bytes_per_s: float | None = None
    bytes_per_s: float | None = None
    kind: tuple[KindFactor, ...] = ()
    error: float | None = None

    @property
    def is_possible(self) -> bool:
        """Whether a device can have these figures: times up to LONGEST_S, rates from SLOWEST_PER_S, and no NaN."""
        rates = (
            *(self.macs_per_s, self.input_bytes_per_s, self.output_bytes_per_s, self.refill_bytes_per_s),
            self.bytes_per_s,
        )
        return (
            all(rate is None or SLOWEST_PER_S <= rate < math.inf for rate in rates)
            and all(0 <= t <= LONGEST_S for t in (self.call_s, self.operator_s))
            and (self.cached_bytes or 0) >= 0
            and all(0 < kind.factor < math.inf for kind in self.kind)
            and (self.error is None or 0 <= self.error < math.inf)
        )

    @property
    def is_roofline(self) -> bool:
        """Whether it prices operators one by one."""
        return self.bytes_per_s is not None

    @property
    def spill_s_per_byte(self) -> float:
        """Seconds for each byte of parameters beyond the cache; 0 where the cache holds all parameters."""
        return 0.0 if self.cached_bytes is None else per_unit(self.refill_bytes_per_s)

    def spill_s(self, param_bytes: int) -> float:
        """Return the seconds of fetching the parameters that the cache does not hold, for every frame."""
        return self.spill_s_per_byte * max(0, param_bytes - (self.cached_bytes or 0))

    def seconds(self, operators: int, macs: int, param_bytes: int) -> float:
        """Return the seconds of computing a stage of so many operators, without its inputs and outputs."""
        work_s = max(macs * per_unit(self.macs_per_s), self.spill_s(param_bytes))
        return self.call_s + operators * self.operator_s + work_s

    def transfer_s(self, input_bytes: int, output_bytes: int) -> float:
        """Return the seconds in which a stage receives its inputs from the host and sends its outputs back."""
        return input_bytes * per_unit(self.input_bytes_per_s) + output_bytes * per_unit(self.output_bytes_per_s)


def per_unit(rate: float | None) -> float:
    """Return the seconds of one unit at so many units a second; a rate of None takes no time."""
    return 0.0 if rate is None else 1 / rate
