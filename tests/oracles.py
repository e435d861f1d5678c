"""Plain oracles, written from the method and sharing no code with what they check."""

from __future__ import annotations

import numpy as np

from perfcore.graph.kernels import Bucket, Collective
from perfcore.graph.ops import Stream


def _at(value, candidate, rank):
    value = np.asarray(value)
    value = np.broadcast_to(value, np.broadcast_shapes(value.shape, (1, 1)))
    return value[candidate if value.shape[0] > 1 else 0, rank if value.shape[1] > 1 else 0].item()


def _bucket_bytes(bucket, candidate, rank):
    terms = [_at(t, candidate, rank) for t in bucket.terms]
    filled, cap = 0.0, bucket.first_cap_bytes
    for position, term in enumerate(terms):
        filled += term
        if filled >= cap or not any(terms[position + 1 :]):
            if position == bucket.index:
                return filled
            if filled > 0:
                cap = bucket.cap_bytes
            filled = 0.0
        elif position == bucket.index:
            return 0.0
    raise AssertionError("no such bucket")


def _runs(op, candidate, rank):
    if not _at(op.present, candidate, rank):
        return False
    for launch in op.launches:
        for name in launch.kernel.__dataclass_fields__:
            dim = getattr(launch.kernel, name)
            if isinstance(dim, Bucket) and _bucket_bytes(dim, candidate, rank) == 0:
                return False
    return True


def _program(graph, durations_us, candidate):
    """What runs where, region by region: each op with its ranks, its launches by rank, and their times by rank."""
    ranks, number, regions = range(graph.num_ranks), 0, []
    for region in graph.regions:
        ops = []
        for op in region.ops:
            here = [r for r in ranks if _runs(op, candidate, r)]
            made = {r: [x for x in op.launches if _at(x.present, candidate, r)] for r in here}
            times = durations_us[number : number + len(op.launches)]
            ops.append((op, here, made, [{r: _at(us, candidate, r) for r in here} for us in times]))
            number += len(op.launches)
        regions.append(ops)
    return regions


def _kernel(launch, us, ranks, clock, h, gap, latency):
    """One launch on the ranks that make it."""
    starts = {}
    for r in ranks:
        s = clock[r]
        starts[r] = max([s[launch.stream] + gap, h[r] + latency] + [s[a] for a in launch.after])
    for r in ranks:
        if isinstance(launch.kernel, Collective):
            clock[r][launch.stream] = max(starts.values()) + max(us[q] for q in ranks)
        else:
            clock[r][launch.stream] = starts[r] + us[r]


def _iterate(graph, program, overheads, h, clock):
    ranks = range(graph.num_ranks)
    captured = False
    for region_number, ops in enumerate(program):
        if region_number == graph.captured_from:
            captured = True
            used = {x.stream for g in graph.regions[region_number:] for op in g.ops for x in op.launches}
            for r in ranks:
                h[r] += overheads.of("cudaGraphLaunch").t1_us
                for stream in used:
                    clock[r][stream] = max(clock[r][stream], clock[r][Stream.COMPUTE])
        for op, here, made, times in ops:
            cost = overheads.of(op.name)
            for r in here:
                if not captured:
                    # Still inside the op before: the gap between launches, less the end charged too early.
                    h[r] += cost.t5_us - cost.t3_us if op.continues else cost.t1_us
                for waiting, awaited in op.waits:
                    clock[r][waiting] = max(clock[r][waiting], clock[r][awaited])
                if made[r] and not captured:
                    h[r] += 0.0 if op.continues else cost.t2_us
            for launch, us in zip(op.launches, times, strict=True):
                on = [r for r in here if launch in made[r]]
                gap = overheads.graph_gap_us if captured else overheads.kernel_gap_us
                for r in on:
                    if not captured and launch is not made[r][0]:
                        h[r] += cost.t5_us
                if on:
                    _kernel(launch, us, on, clock, h, gap, overheads.launch_latency_us)
                for r in on:
                    if not captured:
                        h[r] += cost.t4_us
                    if launch.blocks:
                        h[r] = max(h[r], clock[r][launch.stream])
            for r in here:
                for stream in op.blocks_on:
                    h[r] = max(h[r], clock[r][stream])
                if not captured:
                    h[r] += cost.t3_us if made[r] else cost.alone_us
    if captured:
        for r in ranks:
            h[r] += overheads.graph_launch_us
            for stream in used:
                clock[r][Stream.COMPUTE] = max(clock[r][Stream.COMPUTE], clock[r][stream])


def scalar_iteration_time(graph, durations_us, overheads, candidate=0, warm_up=400, period=420):
    """µs between iterations: the growth of the largest clock over whole periods, after a warm-up.

    420 is a multiple of every period up to 7, so a periodic regime is averaged exactly.
    """
    h = [0.0] * graph.num_ranks
    clock = [dict.fromkeys(Stream, 0.0) for _ in range(graph.num_ranks)]
    program = _program(graph, durations_us, candidate)

    def latest():
        return max(max(h), max(max(c.values()) for c in clock))

    for _ in range(warm_up):
        _iterate(graph, program, overheads, h, clock)
    before = latest()
    for _ in range(period):
        _iterate(graph, program, overheads, h, clock)
    return (latest() - before) / period
