"""What people call the parts of a placement problem."""

from __future__ import annotations

from dataclasses import dataclass

from dse.placement.instances.instance import Instance, Objective


@dataclass(frozen=True, slots=True)
class Labels:
    """Names beside a `Problem`. Letters: t tables, o options, e events.

    Attributes:
        tables: `(t,)`.
        types: `(o,)` sharding type of each option.
        kernels: `(o,)` compute kernel of each option.
        events: `(e,)`.
    """

    tables: tuple[str, ...]
    types: tuple[str, ...]
    kernels: tuple[str, ...]
    events: tuple[str, ...]


def labels_of(instance: Instance, objective: Objective) -> Labels:
    """The names of an instance's problem under an objective."""
    return Labels(instance.names, instance.types, instance.kernels, instance.events(objective))
