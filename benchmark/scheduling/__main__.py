"""Scheduling policies on traces of programs, without a model: ``python -m benchmark.scheduling``.

    python -m benchmark.scheduling                     eleven traces, six cache sizes, every policy
    python -m benchmark.scheduling --quick             small traces, two sizes
    python -m benchmark.scheduling --traces judge rag --policies lpm fcfs --sizes 0.1 0.5
    python -m benchmark.scheduling --plots DIR         also PNGs (needs matplotlib)
    python -m benchmark.scheduling --steady            cost of a step with 256 decoding requests
    python -m benchmark.scheduling --pool              a pool hardly larger than the largest request, and an ample one
    python -m benchmark.scheduling --zero-reuse        share of scheduler and tree in a run of the real model
    python -m benchmark.scheduling --calibrate         step time of the real model, for the profile "cpu"

Hit rates, tokens and virtual times are the same in every run; the scheduler's own µs are real and are not.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from benchmark.scheduling.evaluate import SIZES, Settings, evaluate, traces
from benchmark.scheduling.model import PROFILES
from benchmark.scheduling.plots import figures, write_plots
from benchmark.scheduling.pool import print_pool
from benchmark.scheduling.report import COLUMNS, print_cells, summary
from benchmark.scheduling.steady import print_steady
from benchmark.scheduling.workloads import BATCHES, MIXED
from trellis.runtime.scheduler import POLICIES

QUICK_SCALE, QUICK_SIZES = 0.2, (0.2, 0.5)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.scheduling",
        description="Scheduling policies on traces of programs, without a model.",
        epilog=COLUMNS,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--traces", nargs="+", choices=[*BATCHES, MIXED], default=[])
    parser.add_argument("--policies", nargs="+", choices=sorted(POLICIES), default=[])
    parser.add_argument("--sizes", nargs="+", type=float, help="of the cache, ÷ working set")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="gpu", help="model of step time")
    parser.add_argument("--scale", type=float, help="multiplies the number of programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--load", type=float, default=0.8, help="of the mixed trace, ÷ what the server can do"
    )
    parser.add_argument("--chunk", type=int, default=2048, help="prompt tokens a step")
    parser.add_argument("--quick", action="store_true", help="small traces, two sizes")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write PNGs there")
    parser.add_argument(
        "--steady", action="store_true", help="only measure the cost of a step in steady decode"
    )
    parser.add_argument(
        "--pool",
        action="store_true",
        help="only compare a pool of 1.05 times the largest request with an ample one",
    )
    parser.add_argument(
        "--zero-reuse", action="store_true", help="only measure distinct prompts on the real model"
    )
    parser.add_argument("--calibrate", action="store_true", help="only fit the model of step time")
    parser.add_argument(
        "--requests", type=int, help="of --steady (256 if not given), --pool (500) and --zero-reuse (16)"
    )
    parser.add_argument("--steps", type=int, default=200, help="of --steady")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.steady:
        print_steady(args.requests or 256, args.steps)
        return
    if args.pool:
        print_pool(PROFILES[args.profile], args.requests or 500, args.seed)
        return
    if args.zero_reuse or args.calibrate:
        from benchmark.scheduling import real_model  # torch is not needed for anything else

        if args.zero_reuse:
            real_model.print_zero_reuse(args.requests or 16)
        if args.calibrate:
            real_model.print_calibration()
        return
    if args.plots:
        figures()  # before the work, not after it
    settings = Settings(
        step_time=PROFILES[args.profile],
        scale=args.scale or (QUICK_SCALE if args.quick else 1.0),
        seed=args.seed,
        load=args.load,
        chunk=args.chunk,
        sizes=args.sizes or (QUICK_SIZES if args.quick else SIZES),
        policies=args.policies,
    )
    print(COLUMNS)
    played = (evaluate(trace, settings) for trace in traces(settings, args.traces))
    cells = print_cells(itertools.chain.from_iterable(played))
    print("\n".join(summary(cells)))
    if args.plots:
        print(f"\n{len(write_plots(cells, args.plots))} pictures in {args.plots}")


if __name__ == "__main__":
    main()
