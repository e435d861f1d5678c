"""`dataclass` for frozen values that are made by the hundred for every prediction: the same, made twice as fast.

The `__init__` of a frozen dataclass stores each field by `object.__setattr__`, as the class's own refuses. Here a new
value is filled while its class is a twin of the same layout that accepts stores.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from dataclasses import dataclass as plain_dataclass
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(**settings: bool) -> Any:
        """As `dataclasses.dataclass`, for a frozen class with slots, without bases or default factories."""

        def made(cls: type) -> type:
            value = plain_dataclass(**settings)(cls)
            value.__init__ = _filling(value)
            return value

        return made


def _filling(value: Any) -> Any:
    """`__init__` of a value; its source is put together as `dataclasses` does."""
    scope: dict[str, Any] = {
        "value": value,
        "twin": type(value.__name__, (), {"__slots__": value.__slots__}),
        "take_class": vars(object)["__class__"].__set__,
    }
    scope |= {f"default_{f.name}": f.default for f in fields(value)}
    given = [f.name if f.default is MISSING else f"{f.name}=default_{f.name}" for f in fields(value)]
    lines = [
        f"def __init__(self, {', '.join(given)}):",
        "    take_class(self, twin)",
        *(f"    self.{f.name} = {f.name}" for f in fields(value)),
        "    self.__class__ = value",
    ]
    exec("\n".join(lines), scope)
    made = scope["__init__"]
    made.__qualname__, made.__module__ = f"{value.__qualname__}.__init__", value.__module__
    return made
