"""`dse plan`: where every table lives, how far that may be from the best, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dse.errors import DseError

if TYPE_CHECKING:
    from dse.placement.report.build import PlanReport

TORCHREC = "torchrec"
DesignPath = Annotated[Path | None, typer.Argument(help="A design file.", show_default=False)]
InstanceFile = Annotated[
    Path | None, typer.Option("--instance", help="Place the tables of a cost instance instead of a design's.")
]
Make = Annotated[
    bool, typer.Option("--make-instance", help="Write a cost instance of --tables on --gpus to -o.")
]
Tables = Annotated[
    str | None, typer.Option(help="With --make-instance: a CSV file, or a bundled set's name.")
]
Gpus = Annotated[int | None, typer.Option(help="With --make-instance: ranks.")]
BatchPerGpu = Annotated[
    int | None, typer.Option(help="With --make-instance: samples per rank; 1024 if omitted.")
]
SystemName = Annotated[
    str | None, typer.Option(help="With --make-instance: a node or device; dgx-a100-80gb if omitted.")
]
Dim = Annotated[
    int | None, typer.Option(help="With --make-instance: columns of tables that name none; 128 if omitted.")
]
CacheRatios = Annotated[
    str | None,
    typer.Option(
        "--cache-ratio",
        help="DESIGN, --make-instance: large tables may lie in host memory behind caches of these shares of rows, e.g. 0.1,0.3; 0 is no cache.",
    ),
]
Dense = Annotated[
    bool, typer.Option("--dense", help="Tables may also have gradients of their size (the kernel dense).")
]
Estimator = Annotated[str | None, typer.Option(help="With --make-instance: ours (if omitted) or torchrec.")]
ObjectiveName = Annotated[
    str | None, typer.Option("--objective", help="With --instance: critical_path (if omitted) or rating.")
]
TimeLimit = Annotated[float, typer.Option("--time-limit", help="Seconds for solver and bound.")]
LimitsPath = Annotated[
    Path | None, typer.Option("--limits", help="File of pins, groups, kinds, memory (docs/placement.md).")
]
Export = Annotated[
    str | None, typer.Option(help="torchrec: a program that builds the plan, to -o or stdout.")
]
Compare = Annotated[str | None, typer.Option(help="torchrec: TorchRec's planner beside this one.")]
Import = Annotated[Path | None, typer.Option("--import", help="Price this plan of TorchRec's (JSON) too.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--report",
        help="Folder of the report (page, JSON, CSV); with --make-instance or --export a file.",
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value of the design; may be repeated.")
]
ProfileName = Annotated[str | None, typer.Option("--profile", help="Name or folder of a profile.")]
Seed = Annotated[int, typer.Option(help="Of the search.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable on stdout.")]


# Which ways of the command an option goes with; those without an entry go with all.
_GOES_WITH = {
    **dict.fromkeys(("tables", "gpus", "batch_per_gpu", "dim", "system", "estimator"), ("--make-instance",)),
    **dict.fromkeys(("overrides", "export", "compare", "import_", "dense"), ("DESIGN",)),
    "objective": ("--instance",),
    "cache_ratio": ("DESIGN", "--make-instance"),
    "limits": ("DESIGN", "--instance"),
    "profile": ("DESIGN", "--make-instance"),
}
_SAID = {"overrides": "--set", "import_": "--import"}


def plan(
    ctx: typer.Context,
    design: DesignPath = None,
    *,
    instance: InstanceFile = None,
    objective: ObjectiveName = None,
    limits: LimitsPath = None,
    time_limit: TimeLimit = 20.0,
    seed: Seed = 0,
    overrides: Overrides = None,
    profile: ProfileName = None,
    export: Export = None,
    compare: Compare = None,
    import_: Import = None,
    make_instance: Make = False,
    tables: Tables = None,
    gpus: Gpus = None,
    batch_per_gpu: BatchPerGpu = None,
    dim: Dim = None,
    system: SystemName = None,
    estimator: Estimator = None,
    cache_ratio: CacheRatios = None,
    dense: Dense = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Place embedding tables on ranks, with a bound on how much better any placement could be."""
    way = _way(design, instance, make_instance=make_instance)
    _refuse_others(way, ctx.params)
    _check(time_limit=time_limit, seed=seed)
    _check_bridge(export, compare, import_, out, as_json=as_json)
    ratios = _ratios(cache_ratio)
    if way == "--make-instance":
        _make(ctx.params, ratios, out, as_json=as_json)
    elif instance is not None:
        from dse.cli.plan_instance import planned

        _show(planned(instance, objective, limits, time_limit_s=time_limit, seed=seed), out, as_json=as_json)
    elif design is not None:
        from dse.cli import plan_design
        from dse.placement.design.options import Offer

        offer = Offer(cache_ratios=ratios, dense=dense)
        request = plan_design.Request(
            design, tuple(overrides or ()), profile, limits, time_limit_s=time_limit, seed=seed, offer=offer
        )
        if compare is not None:
            plan_design.compare(request, as_json=as_json)
        elif export is not None:
            plan_design.export(request, out)
        else:
            _show(plan_design.planned(request, import_), out, as_json=as_json)


def _way(design: Path | None, instance: Path | None, *, make_instance: bool) -> str:
    chosen = [
        name
        for name, given in (
            ("DESIGN", design is not None),
            ("--instance", instance is not None),
            ("--make-instance", make_instance),
        )
        if given
    ]
    if len(chosen) != 1:
        got = " and ".join(chosen) or "none of them"
        raise DseError(
            f"`dse plan` takes one of DESIGN, --instance FILE and --make-instance, but got {got}.",
            hint="dse plan spaces/designs/criteo_8gpu.yaml",
        )
    return chosen[0]


def _refuse_others(way: str, params: dict[str, Any]) -> None:
    """Options that belong to another way are a mistake; those of one way are told together."""
    wrong: dict[tuple[str, ...], list[str]] = {}
    for name, value in params.items():
        ways = _GOES_WITH.get(name, (way,))
        left_out = value is None or value is False or value in ((), [])
        if not left_out and way not in ways:
            wrong.setdefault(ways, []).append(_SAID.get(name, "--" + name.replace("_", "-")))
    for ways, names in wrong.items():
        raise DseError(
            f"{' and '.join(names)} belong{'s' * (len(names) == 1)} to {' or '.join(ways)}, but got {way}."
        )


def _check(*, time_limit: float, seed: int) -> None:
    if not 0 < time_limit < 1e6:
        raise DseError(f"`0 < --time-limit < 1e6` must hold, but got {time_limit}.")
    if not 0 <= seed < 2**32:
        raise DseError(f"`0 <= --seed < 2**32` must hold, but got {seed}.")


def _check_bridge(
    export: str | None, compare: str | None, import_: Path | None, out: Path | None, *, as_json: bool
) -> None:
    for name, value in (("--export", export), ("--compare", compare)):
        if value not in (None, TORCHREC):
            raise DseError(f"`{name}` must be torchrec, but got {value!r}.")
    asked = [n for n, v in (("--export", export), ("--compare", compare), ("--import", import_)) if v]
    if len(asked) > 1:
        raise DseError(f"{' and '.join(asked)} exclude one another: run the command once for each.")
    if compare is not None and out is not None:
        raise DseError("--compare prints what it finds and writes no report: leave -o away.")
    if export is not None and as_json:
        raise DseError("--export writes a program, and no JSON: leave --json away.")


def _make(
    params: dict[str, Any], cache_ratios: tuple[float, ...], out: Path | None, *, as_json: bool
) -> None:
    if out is None or params["tables"] is None or params["gpus"] is None:
        raise DseError(
            "`--make-instance` needs --tables, --gpus and -o FILE.",
            hint="dse plan --make-instance --tables synthetic_856 --gpus 128 -o inst.json.gz",
        )
    from dse.cli.plan_make import Wish, make

    wish = Wish(
        tables=params["tables"],
        gpus=params["gpus"],
        batch_per_gpu=1024 if params["batch_per_gpu"] is None else params["batch_per_gpu"],
        dim=128 if params["dim"] is None else params["dim"],
        system=params["system"] or "dgx-a100-80gb",
        estimator=params["estimator"] or "ours",
        cache_ratios=cache_ratios,
        profile=params["profile"],
    )
    make(wish, out, as_json=as_json)


def _ratios(text: str | None) -> tuple[float, ...]:
    """`0.1,0.3` as numbers."""
    try:
        ratios = tuple(sorted({float(part) for part in text.split(",")})) if text else ()
    except ValueError:
        ratios = (1.0,)
    if not all(0 <= r < 1 for r in ratios):
        raise DseError(f"`--cache-ratio` takes shares between 0 and 1, e.g. 0.1,0.3, but got {text!r}.")
    return ratios


def _show(report: PlanReport, out: Path | None, *, as_json: bool) -> None:
    if out is not None:
        from dse.report.placement import write_plan

        write_plan(report, out)
        typer.echo(f"{out / 'report.html'}", err=True)
    if as_json:
        import json

        from dse.placement.report.files import report_json

        typer.echo(json.dumps(report_json(report)))
    else:
        from dse.cli.plan_text import print_plan

        print_plan(report)
