"""Checks that design values share."""

from __future__ import annotations

from enum import StrEnum

from perfcore.errors import DesignError


def check_int(name: str, value: object, *, low: int, high: int) -> None:
    """Refuse what is not an integer within bounds.

    Raises:
        DesignError: with the rule and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise DesignError(f"`{low} <= {name} <= {high}` must hold for an integer, but got {value!r}.")


def check_choice(name: str, value: object, kind: type[StrEnum]) -> None:
    """Refuse what is not a member of the enumeration: its text alone would pass no `is`, and be another choice in silence.

    Raises:
        DesignError: with the rule and the value.
    """
    if not isinstance(value, kind):
        raise DesignError(f"`{name}` must be a member of {kind.__name__}, but got {value!r}.")
