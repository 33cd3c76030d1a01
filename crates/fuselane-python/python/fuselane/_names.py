"""Names of options, and the numbers that stand for them in operators."""

from __future__ import annotations

import difflib
from typing import NoReturn

from . import _native

#: The elementwise activations.
ACTS = {name: number for number, name in enumerate(_native.acts())}

#: Those that rotate and cosine can apply first. Of softmax, there are two.
SOFTMAX_FEATURES = len(ACTS)
SOFTMAX_SEQUENCE = len(ACTS) + 1


def act_number(operator: str, argument: str, name: str) -> int:
    """The number of an elementwise activation."""
    try:
        return ACTS[name]
    except (KeyError, TypeError):
        unknown(operator, argument, name, [*ACTS])


def unknown(operator: str, argument: str, name: object, known: list[str]) -> NoReturn:
    """Raises the error for a name that is none of the known ones."""
    near = difflib.get_close_matches(str(name).lower(), known, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"{operator}: {argument} is {name!r}, expected one of {', '.join(known)}{hint}")
