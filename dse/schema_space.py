"""What a person may write in a space file: the design's sections with axes in them, and how to search."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from dse.schema import (
    MAX_LAYERS,
    Batch,
    CrossLayers,
    Flag,
    Policy,
    Section,
    SystemSection,
    Tables,
    Width,
    WorldSize,
    whole,
)
from perfcore.design.model import Interaction, Loss
from perfcore.design.training import (
    Communication,
    EmbeddingFusion,
    IndexType,
    InteractionFusion,
    Launches,
    MlpFusion,
    Optimizer,
    OptimizerFusion,
    Precision,
)

T = TypeVar("T")
MAX_CHOICES = 1_000
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"  # of a study; it becomes that of a folder


class Choices(Section, Generic[T]):
    """An axis: its values one by one."""

    choices: Annotated[list[T], Field(min_length=1, max_length=MAX_CHOICES)]

    @model_validator(mode="after")
    def _distinct(self) -> Choices[T]:
        for position, value in enumerate(self.choices):
            if value in self.choices[:position]:
                raise ValueError(f"`choices` must be distinct, but {_plain(value)!r} occurs twice")
        return self

    @property
    def values(self) -> list[T]:
        """The axis' values in order."""
        return list(self.choices)


class Span(Section):
    """`low` to `high`, both included, by equal steps or equal factors."""

    low: Annotated[int, BeforeValidator(whole), Field(strict=True, ge=1, le=2**31)]
    high: Annotated[int, BeforeValidator(whole), Field(strict=True, ge=1, le=2**31)]
    step: Annotated[int, BeforeValidator(whole), Field(strict=True, ge=1, le=2**31)] | None = None
    factor: Annotated[float, Field(strict=True, gt=1, le=1e6)] | None = None

    @model_validator(mode="after")
    def _sound(self) -> Span:
        if self.low > self.high:
            raise ValueError(f"`low <= high` must hold, but got low={self.low}, high={self.high}")
        if (self.step is None) == (self.factor is None):
            raise ValueError("give `step` or `factor`, one of them")
        if len(self.values) > MAX_CHOICES:
            raise ValueError(f"a range may have {MAX_CHOICES} values at most, but this one has more")
        return self

    @property
    def values(self) -> list[int]:
        """The axis' values in order; at most one more than allowed."""
        values: list[int] = []
        exact: float = self.low
        while exact <= self.high * (1 + 1e-12) and len(values) <= MAX_CHOICES:
            if not values or round(exact) > values[-1]:
                values.append(round(exact))
            exact = exact + self.step if self.step is not None else exact * (self.factor or 1)
        return values


class Range(Section):
    """An axis: a range of integers."""

    range: Span

    @property
    def values(self) -> list[int]:
        """The axis' values in order."""
        return self.range.values


def _kind(value: Any) -> str:
    if isinstance(value, Range) or (isinstance(value, dict) and "range" in value):
        return "as range"
    return _switch_kind(value)


def _switch_kind(value: Any) -> str:
    return "as choices" if isinstance(value, (dict, Choices)) else "as value"


# A value, or an axis of such values.
Knob: TypeAlias = Annotated[
    Annotated[T, Tag("as value")]
    | Annotated[Choices[T], Tag("as choices")]
    | Annotated[Range, Tag("as range")],
    Discriminator(_kind),
]
# The same without ranges.
Switch: TypeAlias = Annotated[
    Annotated[T, Tag("as value")] | Annotated[Choices[T], Tag("as choices")], Discriminator(_switch_kind)
]
Depth: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=MAX_LAYERS)]


class Layers(Section):
    """Hidden layers of an MLP with a depth of their own; layer k exists only if depth >= k."""

    depth: Knob[Depth]
    widths: Knob[Width]


def _layers(value: Any) -> str:
    return "as layers" if isinstance(value, (dict, Layers)) else "as list"


LayerKnobs: TypeAlias = Annotated[
    Annotated[list[Knob[Width]], Field(max_length=MAX_LAYERS), Tag("as list")]
    | Annotated[Layers, Tag("as layers")],
    Discriminator(_layers),
]


class SpaceModel(Section):
    """Section `model` of a space."""

    num_dense_features: Width
    tables: Tables
    embedding_dim: Knob[Width]
    bottom_hidden: LayerKnobs
    top_hidden: LayerKnobs
    interaction: Switch[Interaction] = Interaction.DOT
    cross_layers: Knob[CrossLayers] = 3
    cross_rank: Knob[Width] = 512
    loss: Loss = Loss.BCE


class SpaceTraining(Section):
    """Section `training` of a space."""

    global_batch: Knob[Batch]
    precision: Switch[Precision] = Precision.FP32
    optimizer: Switch[Literal["sgd", "adagrad", "adam"]] = "sgd"
    table_optimizer: Switch[Optimizer] = Optimizer.SGD
    table_precision: Switch[Literal["fp32", "bf16"]] = "fp32"
    pinned_input: Switch[Flag] = True
    read_loss: Switch[Flag] = False
    synchronize: Switch[Flag] = False
    index_dtype: Switch[IndexType] = IndexType.INT64


class SpaceFusion(Section):
    """Section `fusion` of a space."""

    embedding: Switch[EmbeddingFusion] = EmbeddingFusion.TABLE_BATCHED
    mlp: Switch[MlpFusion] = MlpFusion.EAGER
    interaction: Switch[InteractionFusion] = InteractionFusion.EAGER
    optimizer: Switch[OptimizerFusion] = OptimizerFusion.FOREACH
    launches: Switch[Launches] = Launches.EAGER
    communication: Switch[Communication] = Communication.OVERLAPPED


class SpaceSharding(Section):
    """Section `sharding` of a space."""

    policy: Switch[Policy] = Policy.AUTO


class SpaceSystem(SystemSection):
    """Section `system` of a space."""

    world_size: Knob[WorldSize] = 1


class ObjectiveEntry(Section):
    """One objective."""

    metric: str
    direction: Literal["minimize", "maximize"] | None = None


class ConstraintEntry(Section):
    """Limits on one metric."""

    metric: str
    min: Annotated[float, Field(strict=True)] | None = None
    max: Annotated[float, Field(strict=True)] | None = None

    @model_validator(mode="after")
    def _some_limit(self) -> ConstraintEntry:
        if self.min is None and self.max is None:
            raise ValueError("give `min`, `max`, or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"`min <= max` must hold, but got min={self.min}, max={self.max}")
        return self


class SearchEntry(Section):
    """How the space is searched."""

    method: Literal["auto", "exact", "nsga2", "nsga3", "tpe", "gp", "random", "qmc", "cmaes"] = "auto"
    trials: Annotated[int, BeforeValidator(whole), Field(strict=True, ge=1, le=10**8)] = 500
    batch: Annotated[int, BeforeValidator(whole), Field(strict=True, ge=1, le=10**6)] = 50
    seed: Annotated[int, BeforeValidator(whole), Field(strict=True, ge=0, lt=2**32)] = 0
    refine: Annotated[int, BeforeValidator(whole), Field(strict=True, ge=0, le=10**4)] = 20
    exact_up_to: Annotated[int, BeforeValidator(whole), Field(strict=True, ge=1, le=10**9)] = 2_000_000
    prune: Flag = False


class QualityEntry(Section):
    """Which accuracy proxy prices a design's quality."""

    model: Literal["capacity_law", "none"] = "none"


class InputEntry(Section):
    """What the data loader can feed."""

    samples_per_s: Annotated[float, Field(strict=True, gt=0)] | None = None


class DatasetEntry(Section):
    """How many samples one epoch has."""

    samples: Annotated[float, Field(strict=True, gt=0, le=1e18)] | None = None


class SpaceFile(Section):
    """A space file."""

    name: Annotated[str, Field(pattern=NAME)]
    description: str = ""
    model: SpaceModel
    training: SpaceTraining
    fusion: SpaceFusion = SpaceFusion()
    sharding: SpaceSharding = SpaceSharding()
    system: SpaceSystem
    objectives: Annotated[list[ObjectiveEntry], Field(min_length=1, max_length=5)]
    constraints: Annotated[list[ConstraintEntry], Field(default_factory=list, max_length=50)]
    search: SearchEntry = SearchEntry()
    quality: QualityEntry = QualityEntry()
    input: InputEntry = InputEntry()
    dataset: DatasetEntry = DatasetEntry()
    profile: str | None = None


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
