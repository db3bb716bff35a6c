"""What a training step needs in memory: the ledger of core/step_ledger.py beside live bytes of real steps of TorchRec on gloo
ranks of this CPU. Run `make bench-memory`, or with ARGS=--quick.

Cases are drawn by seed (tests/helpers/step_cases.py): collections, ways to hold tables, pipelines and precisions. Live bytes do
not depend on how fast this machine is, but for copies that gloo's own threads let go of sooner or later: the most of several runs
counts.
"""

import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.publishing import page
from helpers.step_cases import PIPELINES, StepCase, drawn_case, peaks_of
from neuroshard.core.plan import peaks_of as peaks_of_plan
from neuroshard.core.step_memory import Pipeline

FIRST_SEED = 9_300_000  # add to it for cases that nobody has looked at
Kind = tuple[str, tuple[Pipeline, ...], tuple[str | None, ...], tuple[float, ...]]
EVEN, SKEWED = (0.0,), (0.8, 1.05, 1.3)  # exponents of Zipf's law
RUNS = 2
DEDUP = "use_index_dedup"
KINDS: tuple[Kind, ...] = (
    ("plain loop", ("none",), (None,), EVEN),
    ("TrainPipelineBase", ("base",), (None,), EVEN),
    ("TrainPipelineSparseDist", ("sparse-dist",), (None,), EVEN),
    ("TrainPipelineSparseDistLite", ("sparse-dist-lite",), (None,), EVEN),
    ("TrainPipelineFusedSparseDist", ("fused-sparse-dist",), (None,), EVEN),
    ("TrainPipelineSemiSync", ("semi-sync",), (None,), EVEN),
    ("PrefetchTrainPipelineSparseDist", ("prefetch",), (None,), EVEN),
    ("exchange in fp16 or bf16", ("none", *PIPELINES), ("fp16", "bf16"), EVEN),
    ("ids by Zipf's law", ("none", *PIPELINES), (None, None, "fp16"), SKEWED),
    (DEDUP, ("none", *PIPELINES), (None, None, "fp16"), (0.0, 0.8, 1.2)),
)


def errors(case: StepCase) -> list[float]:
    """How far the ledger is off, of each rank, as a share of what was measured."""
    said = peaks_of_plan(case.plan.held, case.plan.shards, case.pipeline, gloo=True)
    measured = [0] * len(said)
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            measured = list(map(max, measured, peaks_of(case, Path(folder))))
    return [one.nbytes / nbytes - 1 for one, nbytes in zip(said, measured, strict=True)]


def row(name: str, found: Sequence[float]) -> tuple[str, ...]:
    """A row of the table, of so many ranks."""
    size = sorted(abs(one) for one in found)
    within = [f"{sum(one <= share for one in size) / len(size):.0%}" for share in (0.01, 0.05)]
    return name, str(len(size)), f"{sum(size) / len(size):.1%}", *within, f"{min(found):+.1%}", f"{max(found):+.1%}"


def main() -> None:
    parser = page.parser(__doc__, "2 cases a row instead of 9")
    parser.add_argument("--seed", type=int, default=FIRST_SEED)
    arguments = page.asked(parser)
    rows, every, cases = list[tuple[str, ...]](), list[float](), 2 if arguments.quick else 9
    for place, (name, pipelines, precisions, exponents) in enumerate(KINDS):
        found = list[float]()
        for number in range(cases):
            seed = arguments.seed + 1000 * place + number
            dedup = name == DEDUP
            off = errors(drawn_case(random.Random(seed), pipelines, precisions, exponents, dedup=dedup))
            found += off
            print(f"{name}, seed {seed}: {', '.join(f'{one:+.1%}' for one in off)}", file=sys.stderr)
        rows.append(row(name, found))
        every += found
    rows.append(row("all", every))
    columns = ("pipeline", "ranks", "mean error", "within 1 %", "within 5 %", "lowest", "highest")
    question = "How far is the ledger of a step's memory from live bytes of real steps?"
    page.show("trainer-memory", question, columns, rows, "measured", published=arguments.publish)


if __name__ == "__main__":
    main()
