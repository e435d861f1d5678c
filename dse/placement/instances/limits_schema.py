"""What a person may write into a file of placement limits."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from dse.schema import Positive, RankEntry, RankList, Section

TYPES = (
    "data_parallel",
    "table_wise",
    "column_wise",
    "row_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
)
Kind: TypeAlias = Literal[
    "data_parallel",
    "table_wise",
    "column_wise",
    "row_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
]


Name: TypeAlias = Annotated[str, Field(min_length=1, strict=True)]
Names: TypeAlias = Annotated[list[Name], Field(min_length=1)]
Kinds: TypeAlias = Annotated[list[Kind], Field(min_length=1)]


class PinEntry(Section):
    """A table that must live on some ranks."""

    table: Name
    ranks: RankList


class KindEntry(Section):
    """What some tables, or all of them, may or may not be."""

    tables: Names | None = None
    allow: Kinds | None = None
    forbid: Kinds | None = None
    forbid_kernels: Names | None = None

    @model_validator(mode="after")
    def _something(self) -> KindEntry:
        if self.allow is None and self.forbid is None and self.forbid_kernels is None:
            raise ValueError("give `allow`, `forbid` or `forbid_kernels`")
        if self.allow is not None and self.forbid is not None:
            raise ValueError("give `allow` or `forbid`, not both")
        return self


class LimitsFile(Section):
    """A file of placement limits."""

    hbm_gib: Positive | None = None
    host_gib: Positive | None = None
    ranks: list[RankEntry] = Field(default_factory=list)
    pin: list[PinEntry] = Field(default_factory=list)
    together: list[Annotated[list[Name], Field(min_length=2)]] = Field(default_factory=list)
    kinds: list[KindEntry] = Field(default_factory=list)
