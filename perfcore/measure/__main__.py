"""`python3 -m perfcore.measure run designs.json --out samples.json`: measure designs on a bare machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from perfcore.errors import PerfcoreError

NEEDED = ("torch", "numpy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 the request is wrong, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "one":
            return _one()
        if options.command == "collectives":
            return _collectives()
        if options.command == "collect":
            return _collect(options)
        return _run(options)
    except PerfcoreError as err:
        _say(f"{err.message} {err.hint or ''}".strip())
        return 2
    except ModuleNotFoundError as err:
        if err.name not in NEEDED:
            raise
        _say(
            f"Measuring needs {' and '.join(NEEDED)}, but {err.name} is missing. Install it: pip install {err.name}"
        )
        return 2
    except KeyboardInterrupt:
        _say("interrupted; what was measured is kept, and the same command goes on")
        return 130


def _run(options: argparse.Namespace) -> int:
    from perfcore.measure.isolate import Settings, measure_isolated
    from perfcore.measure.iteration import check_device
    from perfcore.measure.record import environment, read_designs, write_samples

    check_device(options.device)
    settings = Settings(**{k: v for k, v in vars(options).items() if k in Settings.__slots__})
    designs = read_designs(options.designs)
    samples = []
    for named in designs:
        samples.append(measure_isolated(named, settings))
        # After each design: what is finished survives an interruption.
        write_samples(options.out, samples, environment=environment(options.device))
        print(_line(samples[-1].name, samples[-1].status, samples[-1].detail), file=sys.stderr)  # noqa: T201
    return 0


def _collect(options: argparse.Namespace) -> int:
    import torch

    from perfcore.measure.collect import collect

    if options.threads:
        torch.set_num_threads(options.threads)
    done = collect(options.out, device=options.device, budget_s=options.budget, say=_say)
    for line in done.remarks:
        _say(line)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201


def duration_s(text: str) -> float:
    """Seconds of `90`, `90s`, `3m` or `1h`.

    Raises:
        ValueError: not a duration.
    """
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        return float(number) * units[unit]
    except ValueError:
        raise ValueError(f"a duration like 60s or 3m is needed, but got {text!r}") from None


def _one() -> int:
    from perfcore.measure.isolate import measure_here

    answer = measure_here(json.load(sys.stdin))
    print(json.dumps(answer), flush=True)  # noqa: T201
    if answer["status"] != "ok":
        os._exit(0)  # other ranks may wait for this one for ever, and its exit for them
    return 0


def _collectives() -> int:
    from perfcore.measure.collective_sweep import sweep_here

    print(json.dumps(sweep_here(json.load(sys.stdin))))  # noqa: T201
    return 0


def _line(name: str, status: str, detail: str) -> str:
    return f"{name}: {status}" + (f" ({detail})" if detail else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m perfcore.measure", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure every design of a file")
    run.add_argument("designs", type=Path, help="JSON: {designs: [{name, design}]}")
    run.add_argument("--out", type=Path, required=True, help="JSON file for the samples")
    run.add_argument("--device", default="cpu", help="cpu, cuda or cuda:<index>")
    run.add_argument("--min-iterations", type=int, default=10)
    run.add_argument("--max-seconds", type=float, default=10.0, help="for the iterations of one design")
    run.add_argument("--time-limit-s", type=float, default=120.0, help="after which a design is given up")
    run.add_argument("--max-batch", type=int, help="cap on the samples of an iteration")
    run.add_argument("--max-rows", type=int, help="cap on the rows of a table")
    run.add_argument("--threads", type=int, help="CPU threads")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--max-ranks", type=int, help="largest world size that is trained by as many processes")
    run.add_argument("--no-profile", dest="profile", action="store_false", help="no times by class of op")
    run.add_argument("--traces", help="folder for a Kineto trace and an execution trace of each design")
    sweep = commands.add_parser("collect", help="measure the device's kernels and host overheads")
    sweep.add_argument(
        "--out", type=Path, required=True, help="folder for the samples; one in use is continued"
    )
    sweep.add_argument("--device", default="cpu", help="cpu, cuda or cuda:<index>")
    sweep.add_argument("--budget", type=duration_s, default=480.0, help="time to spend, e.g. 60s or 8m")
    sweep.add_argument("--threads", type=int, default=1, help="CPU threads; one is the steadiest")
    commands.add_parser("one", help="serve one request from standard input (used by `run`)")
    commands.add_parser("collectives", help="serve one request from standard input (used by `collect`)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
