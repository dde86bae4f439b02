"""Files changed as an attacker, a cut cable or a bad disk would: by bytes, lines, leaves of JSON, members of a tar.

Serves the property tests and `benchmarks/attack.py`. Every change is drawn from the generator that is given, so a seed
repeats it.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import random
import re
import tarfile
from collections.abc import Callable
from typing import Any

NUMBERS = (
    "0",
    "-1",
    "1e308",
    "-1e308",
    "nan",
    "inf",
    "1e-320",
    str(2**63),
    str(-(2**63) - 1),
    "9" * 400,
    "0.1",
    "1e400",
)
WORDS = (
    b"\0",
    b"\xff\xfe",
    b"\xe2\x80\xae",
    b"[" * 2000,
    b"{" * 2000,
    b'"',
    b"'",
    b"\\",
    b"\n",
    b"=",
    b".a" * 3000,
    b"%s",
)
LEAVES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 1e308, 5e-324, -0.0, 0.5),
    *("", " ", "\0", "x" * 5000, ",", "é", "../../x", "__class__", [], {}, [[]], {"": 0}, [None] * 100),
)


def mutated(name: str, content: bytes, rng: random.Random) -> bytes:
    """Return the content of a file changed in some way that its kind, told by the name's ending, invites."""
    ways: list[Callable[[bytes, random.Random], bytes]] = [flipped, cut, spliced]
    if name.endswith((".json", ".toml", ".txt")):
        ways += [with_number, with_word, without_line, with_line_twice]
    if name.endswith(".json"):
        ways += [with_leaf] * 4
    if name.endswith(".tar"):
        ways += [with_member] * 4 + [with_header] * 2
    return rng.choice(ways)(content, rng)


def flipped(content: bytes, rng: random.Random) -> bytes:
    """Return it with some bytes changed, most of them near the beginning or anywhere."""
    changed = bytearray(content or b"\0")
    reach = rng.choice((64, 1024, len(changed)))
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        changed[rng.randrange(min(reach, len(changed)))] = rng.choice((0, 1, 255, rng.randrange(256)))
    return bytes(changed)


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def spliced(content: bytes, rng: random.Random) -> bytes:
    """Return it with a piece moved, repeated or removed."""
    first, second, third = sorted(rng.randrange(len(content) + 1) for _ in range(3))
    piece = content[first:second]
    return content[: rng.choice((first, second))] + piece * rng.choice((0, 1, 2)) + content[third:]


def with_number(content: bytes, rng: random.Random) -> bytes:
    found = list(re.finditer(rb"-?\d+(\.\d+)?(e[+-]?\d+)?", content))
    if not found:
        return content
    number = rng.choice(found)
    return content[: number.start()] + rng.choice(NUMBERS).encode() + content[number.end() :]


def with_word(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content) + 1)
    return content[:place] + rng.choice(WORDS) + content[place:]


def without_line(content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def with_line_twice(content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    return b"".join(lines)


def with_leaf(content: bytes, rng: random.Random) -> bytes:
    """Return JSON with one value, or one key, replaced by what nobody expects there."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return flipped(content, rng)
    places: list[tuple[Any, Any]] = []
    waiting = [value] if isinstance(value, (dict, list)) else []
    while waiting:
        holder = waiting.pop()
        for key, inner in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            places.append((holder, key))
            if isinstance(inner, (dict, list)):
                waiting.append(inner)
    for _ in range(rng.choice((1, 1, 1, 3)) if places else 0):
        holder, key = rng.choice(places)
        match rng.randrange(5):
            case 0 if isinstance(holder, dict):
                holder.pop(key, None)
            case 1 if isinstance(holder, dict) and key in holder:
                holder[rng.choice(("", "x", "\0"))] = holder.pop(key)
            case _ if isinstance(holder, dict) or key < len(holder):
                holder[key] = copy.deepcopy(rng.choice(LEAVES))
    return json.dumps(value).encode()


def unpacked(bundle: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(bundle)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]


def packed(files: dict[str, bytes]) -> bytes:
    """Return a bundle of the files, with the right sums in its manifest."""
    manifest = json.loads(files["manifest.json"])
    manifest["sha256"] = {n: hashlib.sha256(c).hexdigest() for n, c in files.items() if n != "manifest.json"}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in {**files, "manifest.json": json.dumps(manifest).encode()}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def with_member(bundle: bytes, rng: random.Random) -> bytes:
    """Return a bundle with one of its texts changed and the sums made right: code and parameters stay as they are."""
    files = unpacked(bundle)
    texts = [n for n in files if n.endswith((".json", ".txt")) or n == "compiled/name"]
    name = rng.choice(texts)
    if name == "manifest.json":
        files[name] = mutated(name, files[name], rng)
        try:
            return packed(files)
        except (ValueError, KeyError, TypeError, AttributeError):
            return flipped(bundle, rng)
    match rng.randrange(8):
        case 0:
            del files[name]
        case 1:
            files[rng.choice(("../x", "/x", "compiled/²", "compiled/9/graph.json", "x" * 300, "a\nb"))] = files.pop(
                name
            )
        case _:
            files[name] = mutated(name if "." in name else "name.txt", files[name], rng)
    return packed(files)


def with_header(bundle: bytes, rng: random.Random) -> bytes:
    """Return a bundle with a field of a header changed and the header's sum made right."""
    changed, places, place = bytearray(bundle), [], 0
    while place + 512 <= len(changed) and any(changed[place : place + 512]):
        places.append(place)
        size = int(bytes(changed[place + 124 : place + 135]).strip(b"\0 ") or b"0", 8)
        place += 512 + -(-size // 512) * 512
    place = rng.choice(places)
    begin, end = rng.choice(((0, 100), (124, 136), (156, 157), (157, 257), (345, 500)))
    junk = rng.choice(
        (b"\0" * 12, b"\xff" * 12, b"7" * 11 + b"\0", b"SxgLKx1235", b"\x80" + b"\0" * 10 + b"\x01", b"-1")
    )
    changed[place + begin : place + end] = (junk * 20)[: end - begin]
    changed[place + 148 : place + 156] = b" " * 8
    changed[place + 148 : place + 156] = f"{sum(changed[place : place + 512]):06o}\0 ".encode()
    return bytes(changed)
