"""Check bounds of `tvm-pipeline plan --certificate`: no plan of any stages and replicas makes more frames a second.

    python tools/check_bound.py plan.cert ...

This file needs Python 3.10 and nothing else; it computes with exact fractions. It is for plans that
`check_certificate.py` cannot list: with replicas, of graphs with too many cuts, or by a search that proves nothing.

The instance. `seconds` are the least that a device takes for each operator, in the order of `operators`; null where it
cannot run it. Devices that share cores do not work together, so a plan uses a set of devices of which no two do. Every
operator is computed once for each frame; an operator of `ordered` by the same device for all frames. Calls, transfers
and memory cost nothing here, which makes plans faster than they are.

The proof. Let a plan make r frames a second, and give each of its devices a weight. A device works at most one second
in a second, so the sum of the weights is at least the sum of the devices' work in a second, each times its weight. That
is at least r times the sum over operators of the least weight times seconds. So r is at most the one sum divided by the
other. An ordered operator lets r be at most one frame in its least seconds. `sets` has weights for every set of devices
that can work together and is part of no other. What holds for the set of the highest bound is `bound_fps`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

MOST_SETS = 10_000
DEVICE = {"name": str, "cores": [int], "seconds": [Fraction]}
CERTIFICATE = {
    "certificate": int, "graph": str, "operators": [str], "ordered": [str], "devices": [DEVICE],
    "sets": [{"devices": [str], "weights": [Fraction]}], "bound_fps": Fraction,
}  # fmt: skip


class Refused(Exception):  # noqa: N818
    """Say why a certificate cannot be checked, or what of it is false."""


def require(holds: bool, why: str) -> None:
    if not holds:
        raise Refused(why)


def decimal(written: str) -> Fraction:
    require(bool(re.fullmatch(r"\d{1,40}(\.\d{1,40})?([eE][+-]?\d{1,2})?", written)), f"{written:.60} is no figure")
    return Fraction(written)


def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    require(len(dict(pairs)) == len(pairs), f"a field stands twice among {[name for name, _ in pairs]!r:.60}")
    return dict(pairs)


def check_kind(value: Any, kind: Any, name: str) -> None:
    """Refuse a value of another kind; seconds may be null."""
    if isinstance(kind, dict):
        require(type(value) is dict and value.keys() == kind.keys(), f"{name}: not the fields")
        for key in kind:
            check_kind(value[key], kind[key], key)
    elif isinstance(kind, list):
        require(type(value) is list, f"{name}: no list")
        for each in value:
            if each is not None or name != "seconds":
                check_kind(each, kind[0], name)
    else:
        fits = type(value) is kind or (kind is Fraction and type(value) is int)
        require(fits and value != "" and (kind is str or 0 <= value < 10**40), f"{name}: {value!r:.60}")


def parsed(written: bytes) -> dict[str, Any]:
    try:
        stated: dict[str, Any] = json.loads(
            written, parse_float=decimal, parse_constant=decimal, object_pairs_hook=table
        )
    except (ValueError, RecursionError) as error:
        raise Refused(f"the file is no JSON: {error}") from error
    check_kind(stated, CERTIFICATE, "the file")
    require(stated["certificate"] == 1 and bool(stated["operators"]), "another version, or no operators")
    for names in (stated["operators"], [device["name"] for device in stated["devices"]]):
        require(len({*names}) == len(names), "two operators or devices have one name")
    return stated


def working_together(cores: dict[str, set[int]]) -> Iterator[set[str]]:
    """Yield sets of devices of which no two share cores, so that every such set is part of one."""
    meeting = [(a, b) for a in cores for b in cores if a < b and cores[a] & cores[b]]
    if not meeting:
        yield set(cores)
        return
    first, _ = meeting[0]
    yield from working_together({name: own for name, own in cores.items() if name != first})
    yield from working_together({name: own for name, own in cores.items() if name == first or not own & cores[first]})


def period(stated: dict[str, Any], names: list[str], weights: list[Fraction]) -> Fraction | None:
    """Return the seconds between frames that no plan on these devices goes below; None where none runs the graph."""
    seconds = {device["name"]: device["seconds"] for device in stated["devices"]}
    require({*names} <= seconds.keys() and len({*names}) == len(names) == len(weights), "a set has other devices")
    require(sum(weights) > 0, "the weights of a set are 0")
    work, least = Fraction(0), Fraction(0)
    for index, operator in enumerate(stated["operators"]):
        taken = [(seconds[name][index], weight) for name, weight in zip(names, weights)]
        able = [(Fraction(each), Fraction(weight)) for each, weight in taken if each is not None]
        if not able:
            return None
        work += min(each * weight for each, weight in able)
        if operator in stated["ordered"]:
            least = max(least, min(each for each, _ in able))
    return max(work / sum(map(Fraction, weights)), least)


def check(written: bytes) -> str:
    """Return what a certificate proves. Raise Refused if it proves nothing."""
    stated = parsed(written)
    require({*stated["ordered"]} <= {*stated["operators"]}, "an ordered operator is unknown")
    for device in stated["devices"]:
        require(len(device["seconds"]) == len(stated["operators"]), f"{device['name']} has other figures")
    listed = [{*each["devices"]} for each in stated["sets"]]
    for count, together in enumerate(working_together({d["name"]: {*d["cores"]} for d in stated["devices"]})):
        require(count < MOST_SETS, "the devices share cores in too many ways")
        require(any(together <= each for each in listed), f"no weights are given for {', '.join(sorted(together))}")
    found = [period(stated, each["devices"], each["weights"]) for each in stated["sets"]]
    periods = [each for each in found if each is not None]
    require(bool(periods), "no devices run the graph")
    require(stated["bound_fps"] * min(periods) >= 1, f"frames may take as little as {float(min(periods)):.12g} s")
    return f"{stated['graph']}: no plan makes more than {float(stated['bound_fps']):.12g} frames a second"


if __name__ == "__main__":
    status = 0
    for path in sys.argv[1:]:
        try:
            print(f"{path}: checked: {check(Path(path).read_bytes())}")
        except (Refused, OSError) as error:
            print(f"{path}: refused: {error}")
            status = 1
    sys.exit(status)
