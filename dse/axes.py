"""From a space file's settings to axes: which vary, when they matter, and which values fit no design."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dse.problems import Problems
from dse.schema import MAX_LAYERS
from dse.schema_space import Choices, Layers, Range, SpaceFile
from dse.space import Axis, Condition, Exclusion, SearchSpace, Value
from perfcore.design.hardware import Device, Node, System
from perfcore.design.model import EmbeddingTable, Interaction, Model
from perfcore.design.rank_groups import RankGroup
from perfcore.design.training import (
    CAPTURE_RULE,
    EmbeddingFusion,
    Launches,
    Optimizer,
    Precision,
    Training,
    can_capture,
)

Loc: TypeAlias = "tuple[str | int, ...]"
MODEL_KEYS = ("num_dense_features", "embedding_dim", "interaction", "cross_layers", "cross_rank")
BATCH, WORLD_SIZE, INTERACTION = "training.global_batch", "system.world_size", "model.interaction"
LAUNCHES, EMBEDDING = "fusion.launches", "fusion.embedding"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a space file.

    Attributes:
        name: dotted path.
        values: one if it is fixed, more if it varies.
        loc: where it stands in the file.
        depends_on: name of the setting that decides whether this one matters.
        matters: for which of that setting's values it does.
    """

    name: str
    values: tuple[Value, ...]
    loc: Loc
    depends_on: str | None = None
    matters: Callable[[Any], bool] = bool


def settings_of(entry: SpaceFile) -> list[Setting]:
    """Every setting, in the order of the file's schema."""
    settings = [Setting(WORLD_SIZE, *_values(entry.system.world_size, "system", "world_size"))]
    for key in (
        "global_batch",
        "precision",
        "optimizer",
        "table_optimizer",
        "table_precision",
        "pinned_input",
        "read_loss",
        "synchronize",
        "index_dtype",
    ):
        settings.append(Setting(f"training.{key}", *_values(getattr(entry.training, key), "training", key)))
    for key in ("num_dense_features", "embedding_dim", "interaction", "loss"):
        settings.append(Setting(f"model.{key}", *_values(getattr(entry.model, key), "model", key)))
    for key in ("cross_layers", "cross_rank"):
        values = _values(getattr(entry.model, key), "model", key)
        settings.append(Setting(f"model.{key}", *values, INTERACTION, _is("dcn_v2")))
    for key in ("bottom_hidden", "top_hidden"):
        settings += _layer_settings(getattr(entry.model, key), key)
    settings.append(
        Setting("sharding.policy", *_values(entry.sharding.policy, "sharding", "policy"), WORLD_SIZE, _many)
    )
    for key, knob in dict(entry.fusion).items():
        condition = {"communication": (WORLD_SIZE, _many), "interaction": (INTERACTION, _is("dot"))}.get(
            key, ()
        )
        settings.append(Setting(f"fusion.{key}", *_values(knob, "fusion", key), *condition))
    return settings


def _many(world_size: Any) -> bool:
    return bool(world_size > 1)


def _is(value: str) -> Callable[[Any], bool]:
    return lambda other: bool(other == value)


def _at_least(layer: int) -> Callable[[Any], bool]:
    return lambda depth: bool(depth >= layer)


def _layer_settings(entry: Layers | Sequence[Any], key: str) -> list[Setting]:
    """Depth, then the width of each layer from 1."""
    name = f"model.{key}"
    if not isinstance(entry, Layers):
        fixed_depth = Setting(f"{name}.depth", (len(entry),), ("model", key))
        widths = [_values(knob, "model", key, i) for i, knob in enumerate(entry)]
        return [fixed_depth, *(Setting(f"{name}.{i + 1}", *w) for i, w in enumerate(widths))]
    depth = Setting(f"{name}.depth", *_values(entry.depth, "model", key, "depth"))
    deepest = min(MAX_LAYERS, max(int(d) for d in depth.values))
    width = _values(entry.widths, "model", key, "widths")
    return [depth, *(Setting(f"{name}.{i}", *width, depth.name, _at_least(i)) for i in range(1, deepest + 1))]


def _values(knob: Any, *loc: str | int) -> tuple[tuple[Value, ...], Loc]:
    values = knob.values if isinstance(knob, (Choices, Range)) else [knob]
    return tuple(getattr(v, "value", v) for v in values), loc


def check_settings(
    settings: Sequence[Setting],
    tables: tuple[EmbeddingTable, ...],
    found: tuple[Device, Node],
    problems: Problems,
) -> None:
    """Note every value that no design can have, at its place."""
    by_name = {s.name: s for s in settings}
    device, node = found
    for world_size in by_name[WORLD_SIZE].values:
        with problems.at(*by_name[WORLD_SIZE].loc):
            System(device, node, int(world_size))
    for name in ("model.bottom_hidden.depth", "model.top_hidden.depth"):
        if max(int(d) for d in by_name[name].values) > MAX_LAYERS:
            problems.add(
                by_name[name].loc, f"`depth <= {MAX_LAYERS}` must hold, but got {by_name[name].values[-1]}"
            )
    for key in ("global_batch", "optimizer", "table_optimizer", "table_precision"):
        for value in by_name[f"training.{key}"].values:
            with problems.at(*by_name[f"training.{key}"].loc):
                _training(key, value)
    for setting in settings:
        if setting.name.startswith("model."):
            _check_model(setting, by_name, tables, problems)


def _training(key: str, value: Any) -> Training:
    kinds: dict[str, Callable[[Any], Any]] = {
        "optimizer": Optimizer,
        "table_optimizer": Optimizer,
        "table_precision": Precision,
    }
    values: dict[str, Any] = {"global_batch": 1, key: kinds.get(key, int)(value)}
    return Training(**values)


def _check_model(
    setting: Setting, by_name: dict[str, Setting], tables: tuple[EmbeddingTable, ...], problems: Problems
) -> None:
    """A model for each value of one setting, the others at their first."""
    key = setting.name.removeprefix("model.")
    layer = key.rpartition(".")[2].isdigit()
    values: dict[str, Any] = {k: by_name[f"model.{k}"].values[0] for k in MODEL_KEYS}
    if not layer and key not in MODEL_KEYS:
        return
    for value in setting.values:
        with problems.at(*setting.loc):
            now = values | ({} if layer else {key: value})
            widths = (int(value),) if layer else ()
            now["interaction"] = Interaction(now["interaction"])
            Model(tables=tables, bottom_hidden=widths, top_hidden=(), **now)


def build_space(
    name: str,
    settings: Sequence[Setting],
    tables: tuple[EmbeddingTable, ...],
    found: tuple[Device, Node],
    problems: Problems,
    *,
    ranks: tuple[RankGroup, ...] = (),
) -> SearchSpace | None:
    """The space of checked settings; notes and gives `None` where an axis has a value that fits no design."""
    by_name = {s.name: s for s in settings}
    axes: list[Axis] = []
    fixed: dict[str, Value] = {}
    for setting in settings:
        condition, never = _condition(setting, by_name)
        if len(setting.values) == 1 or never:
            fixed[setting.name] = setting.values[0]
        else:
            axes.append(Axis(setting.name, setting.values, condition))
    before = len(problems)
    exclusions = _exclusions(by_name, problems)
    if len(problems) > before:
        return None
    return SearchSpace(name, tuple(axes), fixed, tables, found[0], found[1], exclusions, ranks)


def _condition(setting: Setting, by_name: dict[str, Setting]) -> tuple[Condition | None, bool]:
    """When the setting matters, and whether it never does."""
    if setting.depends_on is None:
        return None, False
    parent = by_name[setting.depends_on]
    codes = tuple(code for code, value in enumerate(parent.values) if setting.matters(value))
    if len(codes) == len(parent.values):
        return None, False
    return Condition(parent.name, codes), not codes


def _exclusions(by_name: dict[str, Setting], problems: Problems) -> tuple[Exclusion, ...]:
    """Pairs that no design can have; a value that fits none of the other setting's is noted as a mistake."""
    rules: tuple[tuple[str, str, str, Callable[[Any, Any], bool]], ...] = (
        (BATCH, WORLD_SIZE, "`global_batch % world_size == 0` must hold", lambda b, w: int(b) % int(w) == 0),
        (
            LAUNCHES,
            EMBEDDING,
            CAPTURE_RULE,
            lambda launches, e: can_capture(Launches(launches), EmbeddingFusion(e)),
        ),
    )
    found = [_exclusion((by_name[a], by_name[b]), rule, fits, problems) for a, b, rule, fits in rules]
    return tuple(e for e in found if e is not None)


def _exclusion(
    pair: tuple[Setting, Setting], rule: str, fits: Callable[[Any, Any], bool], problems: Problems
) -> Exclusion | None:
    first, second = pair
    table = [[fits(a, b) for b in second.values] for a in first.values]
    for setting, alive in (
        (first, [any(row) for row in table]),
        (second, [any(c) for c in zip(*table, strict=True)]),
    ):
        dead = [v for v, lives in zip(setting.values, alive, strict=True) if not lives]
        if dead:
            fate = "no value" if len(dead) == len(setting.values) else f"the value {dead[0]} never"
            problems.add(setting.loc, f"{rule}, but {fate} of `{setting.name}` fits any design")
    if all(map(all, table)) or min(len(first.values), len(second.values)) < 2:
        return None
    allowed = tuple(tuple(i for i, ok in enumerate(row) if ok) for row in table)
    return Exclusion((first.name, second.name), allowed, rule)
