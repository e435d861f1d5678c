"""Checks that design values share."""

from __future__ import annotations

from perfcore.errors import DesignError


def check_int(name: str, value: object, *, low: int, high: int) -> None:
    """Refuse what is not an integer within bounds.

    Raises:
        DesignError: with the rule and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise DesignError(f"`{low} <= {name} <= {high}` must hold for an integer, but got {value!r}.")
