"""Space files: axes with their conditions, every mistake, and the guide that explains every key."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from dse.errors import ConfigError, NoFeasibleCandidateError
from dse.objective import METRICS, Objective
from dse.schema import DesignFile
from dse.schema_space import SpaceFile
from dse.space import Condition
from dse.study_config import SearchSettings, StudyConfig, load_space

SPACES = Path("spaces")
TEXT = """
name: tiny
model:
  num_dense_features: 13
  tables: [{name: a, num_embeddings: 1000}]
  embedding_dim: 16
  bottom_hidden: [64]
  top_hidden: [64, 32]
training: {global_batch: 1024}
system: {node: dgx-a100-80gb}
objectives: [{metric: iteration_time_ms}]
"""


def load(folder: Path, text: str, *overrides: str) -> StudyConfig:
    path = folder / "space.yaml"
    path.write_text(text, encoding="utf-8")
    return load_space(path, overrides=overrides)


def mistakes(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return [line.removeprefix(f"{folder}/") for line in caught.value.message.splitlines()]


def test_the_terabyte_space_is_what_it_says() -> None:
    config = load_space(SPACES / "dlrm_terabyte.yaml")
    space = config.space
    assert space.size == 2_698_920_000
    assert (len(space.tables), space.fixed["model.num_dense_features"]) == (26, 13)
    assert (space.node.name, space.device.name) == ("dgx-a100-80gb", "a100-sxm4-80gb")
    values = {a.name: a.values for a in space.axes}
    assert values["system.world_size"] == (1, 2, 4, 8)
    assert values["training.precision"] == ("fp32", "tf32", "bf16")
    assert values["training.global_batch"] == tuple(2**k for k in range(11, 18))
    assert sum(name.startswith("fusion.") for name in values) == 6
    assert {o.metric for o in config.objectives} == {"time_per_sample_ns", "quality_loss"}


def test_the_small_space_can_be_enumerated() -> None:
    config = load_space(SPACES / "dlrm_small.yaml")
    assert config.space.size == len(config.space.enumerate()) == 6_480
    assert config.search.method == "exact"
    assert (config.space.device.name, config.space.fixed["training.precision"]) == ("v100-sxm2-16gb", "fp32")
    widest = 4 * sum(t.num_embeddings for t in config.space.tables) * 64
    assert widest < config.space.device.hbm_bytes / 4


@pytest.mark.parametrize("path", sorted(SPACES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_bundled_space_loads(path: Path) -> None:
    assert load_space(path).name == path.stem


def test_fixed_settings_are_no_axes(tmp_path: Path) -> None:
    config = load(tmp_path, TEXT)
    assert config.space.axes == ()
    assert config.space.size == 1
    assert config.space.fixed["model.top_hidden.2"] == 32
    assert config.objectives == (Objective("iteration_time_ms"),)
    assert config.search == SearchSettings()
    assert config.constraints[0].max == pytest.approx(80, rel=0.1)


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ("{range: {low: 512, high: 4096, factor: 2}}", (512, 1024, 2048, 4096)),
        ("{range: {low: 512, high: 1500, step: 500}}", (512, 1012)),
        ("{range: {low: 1000, high: 2000, factor: 1.5}}", (1000, 1500)),
        ("{range: {low: 1, high: 4, factor: 1.2}}", (1, 2, 3, 4)),
        ("{choices: [64, 1e3, 128]}", (64, 1000, 128)),
    ],
)
def test_axes_have_the_values_that_are_written(tmp_path: Path, written: str, values: tuple[int, ...]) -> None:
    (axis,) = load(tmp_path, TEXT, f"training.global_batch={written}").space.axes
    assert (axis.name, axis.values) == ("training.global_batch", values)


def test_layers_exist_as_deep_as_the_depth(tmp_path: Path) -> None:
    layers = "{depth: {choices: [0, 1, 3]}, widths: {choices: [8, 16]}}"
    space = load(tmp_path, TEXT, f"model.top_hidden={layers}").space
    conditions = {a.name: a.condition for a in space.axes}
    assert conditions == {
        "model.top_hidden.depth": None,
        "model.top_hidden.1": Condition("model.top_hidden.depth", (1, 2)),
        "model.top_hidden.2": Condition("model.top_hidden.depth", (2,)),
        "model.top_hidden.3": Condition("model.top_hidden.depth", (2,)),
    }
    assert space.size == 1 + 2 + 8


def test_a_list_of_layers_may_have_axes_in_it(tmp_path: Path) -> None:
    space = load(tmp_path, TEXT, "model.top_hidden=[64, {choices: [8, 16]}]").space
    assert [a.name for a in space.axes] == ["model.top_hidden.2"]
    assert space.fixed["model.top_hidden.1"] == 64


@pytest.mark.parametrize(("worlds", "size"), [("1", 1), ("8", 6), ("{choices: [1, 2, 8]}", 1 + 6 + 6)])
def test_what_several_ranks_decide_counts_on_several_ranks_only(
    tmp_path: Path, worlds: str, size: int
) -> None:
    axes = [
        "sharding.policy={choices: [auto, row_wise, table_wise]}",
        "fusion.communication={choices: [serial, overlapped]}",
    ]
    assert load(tmp_path, TEXT, *axes, f"system.world_size={worlds}").space.size == size


def test_what_an_interaction_decides_counts_with_it_only(tmp_path: Path) -> None:
    axes = [
        "model.interaction={choices: [dot, cat, dcn_v2]}",
        "model.cross_layers={choices: [1, 2, 3]}",
        "model.cross_rank={choices: [64, 128]}",
        "fusion.interaction={choices: [eager, fused]}",
    ]
    assert load(tmp_path, TEXT, *axes).space.size == 2 + 1 + 6


def test_batches_that_do_not_divide_are_not_counted(tmp_path: Path) -> None:
    axes = ["training.global_batch={choices: [1024, 1026]}", "system.world_size={choices: [1, 2, 4]}"]
    space = load(tmp_path, TEXT, *axes).space
    assert space.size == 5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["training.global_batch={choices: [3, 5]}", "system.world_size={choices: [2, 4]}"],
            "training.global_batch: `global_batch % world_size == 0` must hold, but no value of `training.global_batch` fits",
        ),
        (
            ["training.global_batch={choices: [1025, 1024]}", "system.world_size=4"],
            "training.global_batch: .* but the value 1025 never of `training.global_batch` fits",
        ),
        (
            ["system.world_size={choices: [1, 12]}"],
            r"system\.world_size: `world_size` must be 1 to 8, or a multiple",
        ),
        (
            ["training.precision={choices: []}"],
            r"training\.precision\.choices: 1 or more must be in the list",
        ),
        (
            ["training.precision={choices: [fp32, fp32]}"],
            "`choices` must be distinct, but 'fp32' occurs twice",
        ),
        (["training.precision={choises: [fp32]}"], "unknown key `choises`; did you mean `choices`?"),
        (
            ["training.global_batch={range: {low: 8, high: 4, step: 1}}"],
            "`low <= high` must hold, but got low=8, high=4",
        ),
        (["training.global_batch={range: {low: 8, high: 9}}"], "give `step` or `factor`, one of them"),
        (
            ["training.global_batch={range: {low: 1, high: 1e6, step: 1}}"],
            "a range may have 1000 values at most",
        ),
        (
            ["training.global_batch={range: {low: 1, high: 8, factor: 1}}"],
            "factor: input should be greater than 1",
        ),
        (
            ["model.top_hidden={depth: 99, widths: 8}"],
            r"top_hidden\.depth: input should be less than or equal to 32",
        ),
        (
            ["model.top_hidden={depth: {range: {low: 1, high: 99, step: 1}}, widths: 8}"],
            "`depth <= 32` must hold, but got 99",
        ),
        (
            ["model.embedding_dim={range: {low: 8, high: 8e6, factor: 1e6}}"],
            r"model\.embedding_dim: `1 <= embedding_dim",
        ),
        (
            ["model.tables=[{name: a, num_embeddings: 9, embedding_dim: 8}]"],
            "interaction needs one embedding_dim for all",
        ),
        (
            ["objectives=[{metric: iteration_time}]"],
            r"objectives\.0\.metric: unknown metric `iteration_time`; did you mean",
        ),
        (
            ["objectives=[{metric: quality_loss}]"],
            "`quality_loss` cannot be computed; set `quality.model: capacity_law`",
        ),
        (
            ["objectives=[{metric: hours_per_epoch}]"],
            "`hours_per_epoch` cannot be computed; set `dataset.samples`",
        ),
        (
            ["objectives=[{metric: hbm_gib}, {metric: hbm_gib}]"],
            r"objectives\.1\.metric: `hbm_gib` is already an objective",
        ),
        (["objectives=[]"], "objectives: 1 or more must be in the list"),
        (["constraints=[{metric: hbm_gib}]"], "give `min`, `max`, or both"),
        (["constraints=[{metric: hbm_gib, min: 2, max: 1}]"], "`min <= max` must hold"),
        (["constraints=[{metric: hbm_gib, max: .nan}]"], "input should be a finite number, but got nan"),
        (["search.method=nsga"], r"search\.method: input should be 'auto', 'exact', 'nsga2'"),
        (["search.seed=-1"], r"search\.seed: input should be greater than or equal to 0, but got -1"),
        (["name=../x"], r"name: string should match pattern"),
        (["profile=./none"], r"profile=\./none:1:1: profile: .* does not exist"),
    ],
)
def test_a_mistake_is_named_with_rule_and_value(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, TEXT, *overrides)


def test_a_new_node_or_device_brings_the_other(tmp_path: Path) -> None:
    assert load(tmp_path, TEXT, "system.device=h100-sxm").space.node.name == "dgx-h100"
    text = TEXT.replace("node: dgx-a100-80gb", "device: t4")
    assert load(tmp_path, text, "system.node=dgx-h100").space.device.name == "h100-sxm"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["system.world_size={choices: [1, 2]}"],
            r"table 'a' needs at least 119\.2 GiB .* but a100-sxm4-80gb has 79",
        ),
        (
            ["system.world_size=8", "sharding.policy=table_wise"],
            r"table .* 238\.4 GiB .* \(policies: table_wise;",
        ),
    ],
)
def test_a_table_that_no_placement_can_hold_is_named(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    text = TEXT.replace("num_embeddings: 1000", "num_embeddings: 4e9")
    with pytest.raises(NoFeasibleCandidateError, match=r"space\.yaml:5:3: model\.tables: " + message):
        load(tmp_path, text, *overrides)
    assert load(tmp_path, text, "system.world_size=8").space.size == 1


def test_mistakes_of_all_steps_are_told_together(tmp_path: Path) -> None:
    text = (
        TEXT.replace("dgx-a100-80gb", "dgx").replace("iteration_time_ms", "speed").replace("[{name", "none #")
    )
    assert [re.sub(r";.*|\. .*", "", line) for line in mistakes(tmp_path, text)] == [
        "space.yaml:5:3: model.tables: no bundled table set is called `none`, and a file ends in .csv",
        "space.yaml:10:10: system.node: Node 'dgx' is not in the catalogue",
        "space.yaml:11:15: objectives.0.metric: unknown metric `speed`",
    ]


def test_the_node_limits_and_prices_reach_the_metrics(tmp_path: Path) -> None:
    config = load(tmp_path, TEXT, "input.samples_per_s=5e5", "dataset.samples=4.2e9")
    circumstances = config.circumstances
    assert (circumstances.input_samples_per_s, circumstances.dataset_samples) == (5e5, 4.2e9)
    assert circumstances.price_per_gpu_hour == config.space.node.price_per_gpu_hour > 0
    assert circumstances.gpus_per_node == 8


def test_a_price_is_needed_for_costs(tmp_path: Path) -> None:
    keys = (
        "gpus: 2, intra_bytes_per_s: 5e10, intra_latency_us: 9, inter_bytes_per_s: 1e10, inter_latency_us: 9"
    )
    own = f"{{name: own, device: t4, host_memory_bytes: 1e11, {keys}}}"
    lines = mistakes(
        tmp_path,
        TEXT,
        f"system.node={own}",
        "dataset.samples=1e6",
        "objectives=[{metric: cost_per_epoch_usd}]",
    )
    assert "`cost_per_epoch_usd` cannot be computed; give the node a `price_per_gpu_hour`" in lines[0]


def keys_of(kind: Any, seen: set[Any]) -> Iterator[str]:
    """Every key of a schema, of the sections in it too."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if kind in seen:
            return
        seen.add(kind)
        for key, field in kind.model_fields.items():
            yield key
            yield from keys_of(field.annotation, seen)
            for extra in field.metadata:
                yield from keys_of(extra, seen)
    for argument in get_args(kind):
        yield from keys_of(argument, seen)


def test_a_study_travels_between_processes(tmp_path: Path) -> None:
    config = load(
        tmp_path, TEXT, "training.global_batch={choices: [8, 9]}", "system.world_size={choices: [1, 2]}"
    )
    again = pickle.loads(pickle.dumps(config))
    assert (again.space, again.objectives, again.search) == (config.space, config.objectives, config.search)
    assert again.space.size == 3


def values_of(kind: Any, seen: set[Any]) -> Iterator[str]:
    """Every word that a schema allows as a value."""
    if kind in seen:
        return
    seen.add(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for field in kind.model_fields.values():
            yield from values_of(field.annotation, seen)
    elif isinstance(kind, type) and issubclass(kind, StrEnum):
        yield from kind
    for argument in get_args(kind):
        if isinstance(argument, str):
            yield argument
        elif get_args(argument) or isinstance(argument, type):
            yield from values_of(argument, seen)


def words_of_the_guide() -> set[str]:
    guide = (SPACES / "README.md").read_text(encoding="utf-8")
    return set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`([^`]+)`", guide))))


@pytest.mark.parametrize("schema", [SpaceFile, DesignFile])
def test_the_guide_explains_every_key_and_value(schema: type[BaseModel]) -> None:
    keys, values = set(keys_of(schema, set())), set(values_of(schema, set()))
    assert {"top_hidden", "world_size"} <= keys
    assert {"bf16", "cuda_graph", "row_wise"} <= values
    assert sorted((keys | values) - words_of_the_guide()) == []


def test_the_guide_explains_every_metric() -> None:
    guide = (SPACES / "README.md").read_text(encoding="utf-8")
    assert [m for m in METRICS if f"`{m}`" not in guide] == []
