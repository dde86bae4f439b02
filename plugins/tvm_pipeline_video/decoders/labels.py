"""The names of classes: from a file, from the model's metadata, or COCO's.

Read next: choice.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import read_bytes
from tvm_pipeline.frontends.model_metadata import MOST_CHARACTERS, literal

COCO = tuple(
    """person|bicycle|car|motorcycle|airplane|bus|train|truck|boat|traffic light|fire hydrant|stop sign|parking meter|
bench|bird|cat|dog|horse|sheep|cow|elephant|bear|zebra|giraffe|backpack|umbrella|handbag|tie|suitcase|frisbee|skis|
snowboard|sports ball|kite|baseball bat|baseball glove|skateboard|surfboard|tennis racket|bottle|wine glass|cup|fork|
knife|spoon|bowl|banana|apple|sandwich|orange|broccoli|carrot|hot dog|pizza|donut|cake|chair|couch|potted plant|bed|
dining table|toilet|tv|laptop|mouse|remote|keyboard|cell phone|microwave|oven|toaster|sink|refrigerator|book|clock|
vase|scissors|teddy bear|hair drier|toothbrush""".replace("\n", "").split("|")
)
NAMED = {"coco": COCO}


def read_labels(name: str) -> tuple[str, ...]:
    """Return the labels of a file, one a line, or those of a set of NAMED.

    Raises:
        OptionError: the file cannot be read, is no text, or is empty.
    """
    if name in NAMED:
        return NAMED[name]
    try:
        lines = read_bytes(name, OptionError).decode().splitlines()
    except UnicodeDecodeError as error:
        raise OptionError(
            f"`labels` {name}: it is no text in UTF-8: {error}; give a file of one label a line"
        ) from error
    labels = tuple(line.strip() for line in lines)
    while labels and not labels[-1]:
        labels = labels[:-1]
    if not labels:
        raise OptionError(f"`labels` {name}: it has no labels; give a file of one label a line, or {', '.join(NAMED)}")
    return labels


def labels_of(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the labels that a model's file gives; empty without any.

    Ultralytics writes `names` as a dictionary of Python, Paddle writes `character` as lines, and the label file that
    TFLite files bring along is `labels`.

    Examples:
        >>> labels_of({"names": "{1: 'dog', 0: 'cat'}"})
        ('cat', 'dog')
        >>> labels_of({"character": "text\\\\ntitle"})
        ('text', 'title')
    """
    if names := metadata.get("names", ""):
        return _literal(names)
    lines = metadata.get("character", "") or metadata.get("labels", "")
    return tuple(line.strip() for line in lines.strip("\r\n").splitlines())


def _literal(text: str) -> tuple[str, ...]:
    """Return the names of a list, or of a dictionary from 0 on, in Python's notation; empty where it is none."""
    found = literal(text, MOST_CHARACTERS)
    if isinstance(found, dict):
        if set(found) != set(range(len(found))):
            return ()
        found = [found[index] for index in range(len(found))]
    return tuple(map(str, found)) if isinstance(found, (list, tuple)) else ()


def checked_classes(classes: Sequence[str], labels: Sequence[str]) -> frozenset[str]:
    """Return the labels that `classes` names; a number names the class of that number.

    Raises:
        OptionError: there is no such class.

    Examples:
        >>> sorted(checked_classes(["car", "0"], COCO))
        ['car', 'person']
    """
    found = set()
    for name in classes:
        if name in labels:
            found.add(name)
        elif name.isascii() and name.isdigit() and (not labels or int(name) < len(labels)):
            found.add(labels[int(name)] if labels else f"class {int(name)}")
        else:
            near = difflib.get_close_matches(name, labels, 3)
            known = ", ".join(near) or ", ".join(labels[:8]) + (" and others" if len(labels) > 8 else "")
            advice = f"such as {known}" if labels else "it has no labels, so give numbers, or `labels`"
            raise OptionError(f"`classes` {name}: the model has no class of this name; {advice}", option="classes")
    return frozenset(found)
