"""Grow oblivious trees with CatBoost, and take them out of it as arrays."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfcore.cost.learned import NEVER
from perfcore.cost.learned import Trees as FittedTrees
from perfcore.cost.neighbours import Neighbours

Array = NDArray[np.float64]
Columns = NDArray[np.float32]

SEED = 0


@dataclass(frozen=True, slots=True)
class Trees:
    """Settings of CatBoost; the number of trees is chosen on the validation folds."""

    iterations: int = 1500
    depth: int = 8
    learning_rate: float = 0.1
    columns: float = 0.5  # share of the features that a level may ask
    borders: int = 254  # the most questions of a feature
    repeats: int = 1  # sets of other seeds, whose mean is taken
    strength: float = 1.0  # share of what the trees say that counts


@dataclass(frozen=True, slots=True)
class Grown:
    """Trees, and how many each of the averaged sets has."""

    trees: FittedTrees
    counts: tuple[int, ...]


def grow(
    inputs: Columns,
    target: Array,
    *,
    weight: Array,
    settings: Trees,
    neighbours: Neighbours | None = None,
    unseen: tuple[Columns, Array] | None = None,
    counts: tuple[int, ...] | None = None,
) -> Grown:
    """Trees on `(s, f)` features; with a table of neighbours, the mean of trees that see it and trees that do not.

    Args:
        inputs: the features.
        target: `(s,)`.
        weight: `(s,)` of the rows.
        settings: of every set.
        neighbours: the table.
        unseen: features and targets on which the number of trees is chosen.
        counts: the numbers of trees, where they are known.
    """
    sets = ([False] if neighbours is None else [False, True]) * settings.repeats
    models = []
    for number, told in enumerate(sets):
        model = _catboost(settings, iterations=None if counts is None else counts[number], seed=SEED + number)
        chosen: dict[str, Any] = {}
        if unseen is not None:
            chosen = {
                "eval_set": (_seen(unseen[0], neighbours, told=told), unseen[1]),
                "use_best_model": True,
            }
        model.fit(_seen(inputs, neighbours, told=told), target, sample_weight=weight, **chosen)
        models.append(model)
    trees = to_trees(_mean(models, settings.strength), neighbours)
    return Grown(trees, tuple(int(m.tree_count_) for m in models))


def _seen(inputs: Columns, neighbours: Neighbours | None, *, told: bool) -> Columns:
    """The features, and the table's columns, held constant for trees that shall not ask them."""
    if neighbours is None:
        return inputs
    beside = neighbours.beside(inputs)
    if not told:
        beside[:, inputs.shape[1] :] = 0.0
    return beside


def _mean(models: list[Any], strength: float) -> Any:
    from catboost import sum_models

    if len(models) == 1 and strength == 1:
        return models[0]
    return sum_models(models, weights=[strength / len(models)] * len(models))


def to_trees(model: Any, neighbours: Neighbours | None = None) -> FittedTrees:
    """CatBoost's oblivious trees as arrays."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        model.save_model(str(path), format="json")
        content = json.loads(path.read_text(encoding="utf-8"))
    scale, (bias,) = content["scale_and_bias"]
    columns = content["features_info"]["float_features"]
    borders = [np.array(c["borders"] or [], dtype=np.float32) for c in columns]
    trees = content["oblivious_trees"]
    depth = max(len(t["splits"]) for t in trees)
    features = np.zeros((len(trees), depth), dtype=np.uint8)
    numbers = np.full((len(trees), depth), NEVER, dtype=np.uint8)
    leaves = np.zeros((len(trees), 1 << depth), dtype=np.float32)
    for row, tree in enumerate(trees):
        for level, split in enumerate(tree["splits"]):
            column = features[row, level] = split["float_feature_index"]
            numbers[row, level] = np.searchsorted(borders[column], np.float32(split["border"]))
        leaves[row, : len(tree["leaf_values"])] = np.array(tree["leaf_values"]) * scale
    starts = np.cumsum([0] + [len(b) for b in borders])
    return FittedTrees(
        borders=np.concatenate(borders),
        starts=starts,
        features=features,
        numbers=numbers,
        leaves=leaves,
        bias=float(bias),
        neighbours=neighbours,
    )


def _catboost(trees: Trees, *, iterations: int | None = None, seed: int = SEED) -> Any:
    from catboost import CatBoostRegressor

    return CatBoostRegressor(
        iterations=iterations or trees.iterations,
        depth=trees.depth,
        learning_rate=trees.learning_rate,
        rsm=trees.columns,
        border_count=trees.borders,
        l2_leaf_reg=1.0,
        random_seed=seed,
        thread_count=1,
        verbose=False,
        allow_writing_files=False,
    )
