"""Design files: `load_design` reads one, `dump_design` writes one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from dse.problems import Problems
from dse.ranks import check_ranks, entries_of, groups_in
from dse.resolve import completed_overrides, hardware_of, sets, tables_of
from dse.schema import DesignFile, DesignModel, DesignSharding, Policy
from dse.table_csv import bundled_table_sets, bundled_tables
from dse.yaml_loader import Document, add_plain_scalars, load_yaml
from perfcore.design import hardware
from perfcore.design.design import Design
from perfcore.design.hardware import Device, Node, System
from perfcore.design.model import EmbeddingTable, Interaction, Loss, Model
from perfcore.design.rank_groups import system_of
from perfcore.design.sharding import ComputeKernel, ShardingPlan, TableSharding
from perfcore.design.training import Fusion, Optimizer, Precision, Training
from perfcore.errors import HardwareError

Place: TypeAlias = Callable[[Model, Training, System, str, Fusion], ShardingPlan]


def load_design(path: Path, *, overrides: Sequence[str] = (), place: Place) -> Design:
    """The design that a file describes.

    Args:
        path: a design file.
        overrides: `section.key=value` each. A new `system.device` brings its usual node, a new
            `system.node` its own device, and a new `sharding.policy` drops the file's plan.
        place: what turns a sharding policy into a plan.

    Raises:
        ConfigError: the file or an override has mistakes: all of them, one a line.
        PerfcoreError: `place` finds no plan.
    """
    document = load_yaml(path, DesignFile, overrides=_completed(overrides, path))
    return design_of_document(document, folder=path.parent, place=place)


def design_of_document(document: Document[DesignFile], *, folder: Path, place: Place) -> Design:
    """As `load_design`, from a checked document; relative paths start at `folder`."""
    problems, entry = Problems(document), document.value
    model = training = system = None
    with problems.at("model"):
        model = _model(entry.model, folder, problems)
    with problems.at("training"):
        training = _training(entry)
    found = hardware_of(entry.system, folder, problems)
    check_ranks(entry.system.ranks, entry.system.world_size, problems, "system", "ranks")
    if found is not None:
        with problems.at("system", "world_size"):
            system = system_of(*found, entry.system.world_size, groups_in(entry.system.ranks))
    problems.check()
    assert model is not None
    assert training is not None
    assert system is not None
    if training.global_batch % system.world_size:
        problems.add(
            ("training", "global_batch"),
            "`global_batch % world_size == 0` must hold, but got "
            f"global_batch={training.global_batch}, world_size={system.world_size}",
        )
        problems.check()
    fusion = None
    with problems.at("fusion"):
        fusion = Fusion(**dict(entry.fusion))
    problems.check()
    assert fusion is not None
    plan = _plan(entry.sharding, model, training, system, fusion, place, problems)
    design = None
    with problems.at("sharding"):
        design = Design(model, training, fusion, plan, system)
    problems.check()
    assert design is not None
    return design


def dump_design(design: Design) -> str:
    """The design as a file's text; `load_design` gives the same design back."""
    model = _plain(asdict(design.model))
    model["tables"] = _tables_entry(design.model.tables)
    document = {
        "model": model,
        "training": _plain(asdict(design.training)),
        "fusion": _plain(asdict(design.fusion)),
        "sharding": {"plan": [_placed_entry(t) for t in design.sharding.tables]},
        "system": {
            "node": _hardware_entry(design.system.node),
            "device": _hardware_entry(design.system.device),
            "world_size": design.system.world_size,
            **({"ranks": entries_of(design.system)} if design.system.uneven else {}),
        },
    }
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110)


class _Dumper(yaml.SafeDumper):
    """Lists of numbers, and the entries of a list, in one line each."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: Any = None) -> yaml.SequenceNode:
        node = super().represent_sequence(tag, sequence, flow_style)
        node.flow_style = all(isinstance(v, yaml.ScalarNode) for v in node.value)
        for item in node.value:
            if isinstance(item, yaml.MappingNode):
                item.flow_style = True
        return node


add_plain_scalars(_Dumper)  # so that it quotes what the loader would read as a number


def _completed(overrides: Sequence[str], file: Path) -> list[str]:
    """As `completed_overrides`; and a new policy replaces the file's plan, unless that is set as well."""
    replaces = sets(overrides, "sharding.policy") and not sets(overrides, "sharding.plan")
    return [*(["sharding.plan=null"] if replaces else []), *completed_overrides(overrides, file)]


def _model(entry: DesignModel, folder: Path, problems: Problems) -> Model | None:
    tables: tuple[EmbeddingTable, ...] = ()
    with problems.at("model", "tables"):
        tables = tables_of(entry.tables, folder)
    if not tables:
        return None
    return Model(
        num_dense_features=entry.num_dense_features,
        tables=tables,
        embedding_dim=entry.embedding_dim,
        bottom_hidden=tuple(entry.bottom_hidden),
        top_hidden=tuple(entry.top_hidden),
        interaction=Interaction(entry.interaction),
        cross_layers=entry.cross_layers,
        cross_rank=entry.cross_rank,
        loss=Loss(entry.loss),
    )


def _training(entry: DesignFile) -> Training:
    t = entry.training
    return Training(
        global_batch=t.global_batch,
        precision=t.precision,
        optimizer=Optimizer(t.optimizer),
        table_optimizer=t.table_optimizer,
        table_precision=Precision(t.table_precision),
        pinned_input=t.pinned_input,
        read_loss=t.read_loss,
        synchronize=t.synchronize,
        index_dtype=t.index_dtype,
        program=t.program,
    )


def _plan(
    entry: DesignSharding,
    model: Model,
    training: Training,
    system: System,
    fusion: Fusion,
    place: Place,
    problems: Problems,
) -> ShardingPlan:
    if entry.plan is not None:
        tables: list[TableSharding] = []
        for position, p in enumerate(entry.plan):
            with problems.at("sharding", "plan", position):
                tables.append(TableSharding(p.table, p.type, tuple(p.ranks), p.kernel, p.cache_ratio))
        problems.check()
        return ShardingPlan(tuple(tables))
    if system.world_size == 1:
        return ShardingPlan.on_one_rank(model)
    return place(model, training, system, str(entry.policy or Policy.AUTO), fusion)


def _tables_entry(tables: tuple[EmbeddingTable, ...]) -> str | list[dict[str, Any]]:
    for name in bundled_table_sets():
        if bundled_tables(name) == tables:
            return name
    return [{k: v for k, v in asdict(t).items() if v is not None} for t in tables]


def _placed_entry(placed: TableSharding) -> dict[str, Any]:
    """One table's placement, without what is usual."""
    entry: dict[str, Any] = _plain(asdict(placed))
    usual = {"kernel": ComputeKernel.FUSED.value, "cache_ratio": None}
    return {k: v for k, v in entry.items() if k not in usual or v != usual[k]}


def _hardware_entry(value: Device | Node) -> str | dict[str, Any]:
    read = hardware.device if isinstance(value, Device) else hardware.node
    try:
        if read(value.name) == value:
            return value.name
    except HardwareError:
        pass
    entry = {f.name: getattr(value, f.name) for f in fields(value)}
    return {k: v for k, v in entry.items() if v != math.inf}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value.value if hasattr(value, "value") else value
