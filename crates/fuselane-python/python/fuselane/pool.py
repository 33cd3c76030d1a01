"""The memory of large results, which is used again instead of being given back to the system.

``FUSELANE_POOL=0`` in the environment turns it off.
"""

from __future__ import annotations

from typing import NamedTuple

from . import _native


class Stats(NamedTuple):
    """What the pool holds."""

    #: Bytes that nobody uses, kept for the next result.
    held_bytes: int
    #: Bytes of results that are alive.
    used_bytes: int
    #: Results that took memory which was there.
    reused: int
    #: Results that needed new memory.
    fresh: int


def stats() -> Stats:
    """What the pool holds now.

    Example:
        >>> import fuselane
        >>> fuselane.pool.stats().held_bytes >= 0
        True
    """
    return Stats(*_native.pool_stats())


def trim() -> None:
    """Gives all unused memory back to the system.

    Example:
        >>> import fuselane
        >>> fuselane.pool.trim()
        >>> fuselane.pool.stats().held_bytes
        0
    """
    _native.pool_trim()


def limit() -> int:
    """The most bytes of unused memory that are kept: a quarter of the machine's, at first."""
    return _native.pool_limit()


def set_limit(nbytes: int) -> None:
    """Sets the most bytes of unused memory that are kept; 0 turns the pool off."""
    _native.pool_set_limit(nbytes)
