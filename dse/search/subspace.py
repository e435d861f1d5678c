"""A part of a space: some of its axes held at one value."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dse.space import Codes, SearchSpace


def held_at(space: SearchSpace, row: Codes, names: frozenset[str]) -> SearchSpace:
    """The space with some axes held where the `(a,)` codes of a design are.

    Rules between an axis that is held and another are left out: ask the whole space what it allows.
    """
    code = {a.name: int(c) for a, c in zip(space.axes, row, strict=True)}
    fixed = dict(space.fixed) | {a.name: a.values[code[a.name]] for a in space.axes if a.name in names}
    axes = []
    for axis in space.axes:
        if axis.name in names:
            continue
        parent = axis.condition
        if parent is None or parent.axis not in names:
            axes.append(axis)
        elif code[parent.axis] in parent.codes:
            axes.append(replace(axis, condition=None))
        else:
            fixed[axis.name] = axis.values[0]
    rules = tuple(e for e in space.exclusions if not names & set(e.axes))
    return replace(space, axes=tuple(axes), fixed=fixed, exclusions=rules)


def in_whole(space: SearchSpace, part: SearchSpace, codes: Codes, row: Codes) -> Codes:
    """`(n, a)` canonical codes of the whole space, of `(n, b)` codes of its part at a row."""
    whole = np.repeat(row[None], len(codes), axis=0)
    for i, axis in enumerate(part.axes):
        whole[:, space.position(axis.name)] = codes[:, i]
    return space.canonical(whole)
