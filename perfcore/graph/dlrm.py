"""One training iteration of a DLRM as a workload graph, op by op as PyTorch executes it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from perfcore.design.design import Design
from perfcore.design.model import Interaction
from perfcore.design.training import Communication, Launches, OptimizerFusion
from perfcore.graph import (
    communication,
    cross,
    embedding,
    input_exchange,
    interaction,
    loss,
    mlp,
    optimizer,
    table_optimizer,
)
from perfcore.graph.dims import Dims, Structure, dims_of, structure_of
from perfcore.graph.kernels import Array
from perfcore.graph.ops import Op, Region, WorkloadGraph
from perfcore.graph.parts import AWAIT_COLLECTIVES
from perfcore.graph.published import Published, after_graph
from perfcore.graph.sizes import BOTTOM, TOP, Sizes


class DlrmBuilder:
    """Builds the graphs of all structures over one set of dims.

    A region is built once for each setting of the switches that it depends on, so structures that agree on
    them share the very object.
    """

    def __init__(self, dims: Dims) -> None:
        self._sizes = Sizes(dims)
        self._regions: dict[tuple[Hashable, ...], Region] = {}
        self._terms: dict[tuple[Hashable, ...], tuple[Array, ...]] = {}
        self._published = Published(self._sizes)

    def graph(self, structure: Structure) -> WorkloadGraph:
        """The iteration of one structure: input, forward, loss, backward, optimizers."""
        fusion = structure.fusion
        captured = fusion.launches is Launches.CUDA_GRAPH
        pipelined = structure.distributed and fusion.communication.exchanges_ahead
        inputs = self._region(
            "input",
            loss.input_copies,
            fusion.embedding,
            structure.index_dtype,
            pinned_input=structure.pinned_input,
            distributed=structure.distributed,
            ahead=pipelined,
        )
        ahead = self._input_ahead(structure) if pipelined else []
        # What follows a graph's end stands, in the steady state, before the next iteration's copies.
        reads = [self._region("read_loss", loss.read)] if structure.read_loss else []
        waits = self._synchronization(structure)
        first = [*reads, *waits] if captured else []
        regions = (
            *first,
            *([inputs, *ahead] if captured else [*ahead, inputs]),
            *self._fill_ahead(structure),
            *self._forward(structure),
            *self._loss(structure),
            *self._backward(structure),
            *self._optimizers(structure),
            *([] if captured else waits),
        )
        regions = self._published.regions(structure, regions)
        if captured:
            first = [*after_graph(structure, regions), *first]
            regions = (*first, *(r for r in regions if r not in first))
        return WorkloadGraph(
            tuple(r for r in regions if r.ops),
            num_ranks=self._sizes.dims.num_ranks,
            captured_from=sum(bool(r.ops) for r in first) + 1 if captured else None,
        )

    def _synchronization(self, structure: Structure) -> list[Region]:
        if not structure.synchronize:
            return []
        several = structure.distributed or structure.fusion.communication.fills_ahead
        return [self._region("synchronize", loss.synchronize, several_streams=several)]

    def _forward(self, structure: Structure) -> list[Region]:
        fusion, tables = structure.fusion, _table_switches(structure)
        bottom = [self._layer(BOTTOM, j, structure) for j in range(self._sizes.num_slots(BOTTOM))]
        lookup = self._region(
            "embedding",
            embedding.forward,
            *tables,
            structure.table_optimizer,
            structure.index_dtype,
            distributed=structure.distributed,
            fills=not fusion.communication.fills_ahead,
        )
        if structure.distributed:
            sparse = [*self._input_exchange(structure), lookup]
            call = self._region("forward_exchange", communication.forward_exchange, *tables)
            wait = self._region("forward_wait", communication.forward_wait, *tables)
            serial = fusion.communication is Communication.SERIAL
            first = [*sparse, call, wait, *bottom] if serial else [*sparse, call, *bottom, wait]
        else:
            first = [*bottom, lookup]
        top = [self._layer(TOP, j, structure) for j in range(self._sizes.num_slots(TOP))]
        return [*first, *self._interaction(structure), *top]

    def _input_exchange(self, structure: Structure) -> list[Region]:
        """What is exchanged between a batch's copy and its lookups."""
        mode = structure.fusion.communication
        if mode.exchanges_ahead:
            return []
        return [self._region("input_exchange", input_exchange.exchange, mode, structure.index_dtype)]

    def _input_ahead(self, structure: Structure) -> list[Region]:
        """The exchanged batch is waited for, and the next one's exchange begins."""
        captured = structure.fusion.launches is Launches.CUDA_GRAPH
        dtype = structure.index_dtype
        return [
            self._region("input_received", input_exchange.received, dtype),
            self._region("lengths_ahead", input_exchange.lengths_ahead, dtype, captured=captured),
        ]

    def _indices_ahead(self, structure: Structure) -> list[Region]:
        """The next batch's exchange goes on after the forward pass."""
        if not structure.distributed or not structure.fusion.communication.exchanges_ahead:
            return []
        return [self._region("indices_ahead", input_exchange.indices_ahead, structure.index_dtype)]

    def _fill_ahead(self, structure: Structure) -> list[Region]:
        """Caches are filled for the next batch."""
        if not structure.fusion.communication.fills_ahead:
            return []
        switches, distributed = (*_table_switches(structure), structure.index_dtype), structure.distributed
        return [self._region("fill_ahead", embedding.fill_ahead, *switches, distributed=distributed)]

    def _loss(self, structure: Structure) -> list[Region]:
        names = (
            optimizer.CLASS_NAME[structure.optimizer],
            *table_optimizer.optimizer_names(structure.table_optimizer, structure.fusion.embedding),
        )
        eager = structure.fusion.launches is Launches.EAGER
        return [
            self._region("loss", loss.forward, structure.loss, structure.precision),
            *self._indices_ahead(structure),
            *([self._region("read_loss", loss.read)] if eager and structure.read_loss else []),
            self._region("zero_grad", loss.zero_grad, names),
            self._region("loss_backward", loss.backward, structure.loss, structure.precision),
        ]

    def _backward(self, structure: Structure) -> list[Region]:
        """Autograd's order; each layer's gradients are followed by the bucket that they may close."""
        if structure.distributed:
            return self._distributed_backward(structure)
        top, bottom = (range(self._sizes.num_slots(module)) for module in (TOP, BOTTOM))
        return [
            *(self._layer_backward(TOP, slot, structure, ()) for slot in reversed(top)),
            *(region for region, _ in self._interaction_backward(structure)),
            self._lookup_backward(structure),
            *(self._layer_backward(BOTTOM, slot, structure, ()) for slot in reversed(bottom)),
        ]

    def _distributed_backward(self, structure: Structure) -> list[Region]:
        """The exchange of the embeddings' gradients is called before the bottom MLP's backward, awaited after."""
        tables, mode = _table_switches(structure), structure.fusion.communication
        serial = mode is Communication.SERIAL
        reduce = _Reducer(self, structure)
        waits = AWAIT_COLLECTIVES if serial else ()
        regions: list[Region] = []
        for slot in reversed(range(self._sizes.num_slots(TOP))):
            regions += [self._layer_backward(TOP, slot, structure, waits), reduce.next()]
        for region, has_parameters in self._interaction_backward(structure):
            regions += [self._awaiting(region) if serial else region]
            regions += [reduce.next()] if has_parameters else []
        regions.append(self._region("backward_exchange", communication.backward_exchange, *tables, mode))
        last = self._sizes.num_slots(BOTTOM) - 1
        for slot in range(last, -1, -1):
            holds = slot == last and not serial
            at_layer = communication.HOLD_EVENT if holds else waits
            regions += [self._layer_backward(BOTTOM, slot, structure, at_layer), reduce.next()]
        lookup = self._lookup_backward(structure)
        regions.append(self._region("backward_wait", communication.backward_wait, *tables, mode))
        return [*regions, self._awaiting(lookup) if serial else lookup, *reduce.rest()]

    def _lookup_backward(self, structure: Structure) -> Region:
        return self._region(
            "embedding_backward",
            embedding.backward,
            *_table_switches(structure),
            structure.table_optimizer,
            structure.index_dtype,
            distributed=structure.distributed,
            awaits_fill=structure.fusion.communication.fills_ahead,
        )

    def _awaiting(self, region: Region) -> Region:
        """The region with its start on every rank waiting for all collectives called so far."""
        key = ("awaiting", region)
        if key not in self._regions:
            ops = list(region.ops)
            for position, op in enumerate(region.ops):
                ops[position] = replace(op, waits=AWAIT_COLLECTIVES)
                if op.present is True:
                    break
            self._regions[key] = Region(region.name, tuple(ops))
        return self._regions[key]

    def _optimizers(self, structure: Structure) -> list[Region]:
        kind, implementation = structure.optimizer, structure.fusion.optimizer
        if implementation is OptimizerFusion.FOR_LOOP:
            where = optimizer.slots(self._sizes, structure.interaction, structure.cross_layers)
            dense = [
                self._region(
                    f"optimizer/{module}/{slot}",
                    optimizer.for_loop,
                    kind,
                    module,
                    slot,
                    self._input_kind(module, slot, structure.interaction),
                    distributed=structure.distributed,
                )
                for module, slot in where
            ]
        else:
            switches = (kind, implementation, structure.interaction, structure.cross_layers)
            dense = [
                self._region(
                    "optimizer", optimizer.multi_tensor, *switches, distributed=structure.distributed
                )
            ]
        embeddings, table_precision = _table_switches(structure)
        tables = self._region(
            "table_optimizer",
            table_optimizer.step,
            embeddings,
            structure.table_optimizer,
            table_precision,
            distributed=structure.distributed,
        )
        return [*dense, tables]

    def _layer(self, module: str, slot: int, structure: Structure) -> Region:
        return self._region(
            f"{module}/{slot}",
            mlp.forward,
            module,
            slot,
            structure.precision,
            structure.fusion.mlp,
            self._input_kind(module, slot, structure.interaction),
        )

    def _layer_backward(self, module: str, slot: int, structure: Structure, waits: mlp.Waits) -> Region:
        return self._region(
            f"{module}_backward/{slot}",
            mlp.backward,
            module,
            slot,
            structure.precision,
            structure.fusion.mlp,
            self._input_kind(module, slot, structure.interaction),
            distributed=structure.distributed,
            waits=waits,
        )

    def _interaction(self, structure: Structure) -> list[Region]:
        switches = (structure.precision, *_table_switches(structure))
        if structure.interaction is Interaction.DOT:
            return [self._region("interaction", interaction.forward, *_dot_switches(structure))]
        concat = self._region("interaction", interaction.concat_forward, *switches)
        layer = [self._region("cross", cross.forward, structure.precision)] * structure.cross_layers
        return [concat, *(layer if structure.interaction is Interaction.DCN_V2 else [])]

    def _interaction_backward(self, structure: Structure) -> list[tuple[Region, bool]]:
        """Regions in autograd's order, and whether each has parameters."""
        if structure.interaction is Interaction.DOT:
            dot = self._region("interaction_backward", interaction.backward, *_dot_switches(structure))
            return [(dot, False)]
        switches = (structure.precision, *_table_switches(structure))
        concat = self._region("interaction_backward", interaction.concat_only_backward, *switches)
        depth = structure.cross_layers if structure.interaction is Interaction.DCN_V2 else 0
        layers = [
            self._region(
                "cross_backward",
                cross.backward,
                structure.precision,
                first=number == 0,
                last=number == depth - 1,
                distributed=structure.distributed,
            )
            for number in reversed(range(depth))
        ]
        return [*((layer, True) for layer in layers), (concat, False)]

    def _input_kind(self, module: str, slot: int, kind: Interaction) -> Interaction | None:
        """The interaction, where the slot's sizes depend on it."""
        return kind if module == TOP and self._sizes.reads_module_input(module, slot) else None

    def _region(
        self, name: str, build: Callable[..., tuple[Op, ...]], *switches: Any, **named: Any
    ) -> Region:
        key = (name, build, switches, tuple(named.items()))
        region = self._regions.get(key)
        if region is None:
            region = self._regions[key] = Region(name, build(self._sizes, *switches, **named))
        return region


class _Reducer:
    """Hands out the all-reduce regions of one structure in the order in which gradients become ready."""

    def __init__(self, builder: DlrmBuilder, structure: Structure) -> None:
        switches = (structure.interaction, structure.cross_layers, structure.table_precision)
        terms = builder._terms.get(switches)
        if terms is None:
            terms = builder._terms[switches] = communication.gradient_terms(builder._sizes, *switches)
        self._builder, self._switches, self._terms, self._given = builder, switches, terms, 0

    def next(self) -> Region:
        """The region of the next term."""
        index, key = self._given, ("all_reduce", self._switches, self._given)
        self._given += 1
        regions = self._builder._regions
        if key not in regions:
            ops = communication.all_reduce(self._builder._sizes, self._terms, index)
            regions[key] = Region(f"all_reduce/{index}", ops)
        return regions[key]

    def rest(self) -> list[Region]:
        """The regions of all terms left."""
        return [self.next() for _ in range(len(self._terms) - self._given)]


def graph_of(design: Design) -> WorkloadGraph:
    """The iteration of one design."""
    return DlrmBuilder(dims_of([design])).graph(structure_of(design))


def _table_switches(structure: Structure) -> tuple[Any, Any]:
    return structure.fusion.embedding, structure.table_precision


def _dot_switches(structure: Structure) -> tuple[Any, ...]:
    return (structure.precision, structure.fusion.interaction, *_table_switches(structure))
