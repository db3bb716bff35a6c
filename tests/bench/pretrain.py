"""Cost models: ours beside the paper's nets and recipe, on the same data, in one run.

    make bench-pretrain ARGS="--tables tables.json --costs costs/"
    python tests/bench/pretrain.py --quick

Labels are the synthetic backend's formula with its noise, predictions are held against the formula without; with --costs also
labels that were measured.
"""

import argparse
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scipy.stats import kendalltau

from bench.pretraining import paper
from bench.pretraining.curves import AIM, TESTS, Point, curve, needed, predicted
from bench.pretraining.plans import errors_on_plans
from bench.publishing import page
from bench.searching.tasks import pool
from helpers.costs import BENCH, collective_cost, compute_cost
from neuroshard.augment.run import augment
from neuroshard.augment.settings import AugmentSettings
from neuroshard.core.case import Cases
from neuroshard.core.cost import Costs
from neuroshard.core.label import labels, rounds_of
from neuroshard.files.costs import read_costs
from neuroshard.measure import formula
from neuroshard.pretrain.labels import collect, mape
from neuroshard.pretrain.run import pretrain
from neuroshard.pretrain.stand_in import sets_error
from neuroshard.store.tables import load_tables

NOISE = 0.017  # of the median of 5 repeats with 3 %
MEMORY = 80 * 2**30
EPOCHS = 300  # at most, of a net that `pretrain` itself would not have taken
OTHER_HARDWARE = {"HBM_BYTES": 0.6e9, "CACHE_BYTES": 3.0e9, "CACHE_SIZE": 6e6, "BACKWARD_LAUNCH_MS": 0.12,
                  "FORWARD_VECTORS": 9e6, "BACKWARD_VECTORS": 5e6}  # fmt: skip


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bench = Bench(options)
    for part in options.only:
        getattr(bench, part)()


def arguments() -> argparse.Namespace:
    parser = page.parser(__doc__, "everything, but small")
    parser.add_argument("--tables", default="mlperf-dlrm-dcnv2", help="a file of tables, or a preset")
    parser.add_argument("--costs", type=Path, help="also compare on costs that `neuroshard measure` wrote")
    parser.add_argument(
        "--tables-dir", type=Path, help="folder of public table sets: also errors on the device sets of plans"
    )
    parser.add_argument("--plan-cases", type=int, default=2000, help="compute cases of the nets for these")
    parser.add_argument("--plan-tasks", type=int, default=6, help="tasks for each number of devices")
    parser.add_argument("--only", nargs="+", default=["measured", "few", "curves", "transfer", "plans"])
    parser.add_argument("--paper-epochs", type=int, default=paper.EPOCHS)
    parser.add_argument("--sizes", type=int, nargs="+", default=[500, 1000, 1500, 2000, 4000])
    parser.add_argument(
        "--few", type=int, nargs="+", default=[50, 100, 200, 400, 800], help="cases of --costs, to learn from"
    )
    parser.add_argument("--acquired", type=int, nargs="*", default=[1500], help="acquired cases, in as many rounds")
    parser.add_argument("--draws", type=int, default=3, help="of tables, cases and seeds, for the curves")
    parser.add_argument("--curve-epochs", type=int, help="at most, for the curves")
    options = page.asked(parser)
    if options.quick:
        options.paper_epochs = 50
        options.sizes, options.acquired, options.few, options.draws = [100, 200, 400], [150], [50], 2
        options.plan_cases, options.plan_tasks = 400, 2
    return options


class Bench:
    """The parts of the benchmark; each puts its figures into `found` and prints them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tables, _ = load_tables(options.tables)

    def say(self, name: str, **figures: Any) -> None:
        shown = "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
        )
        print(f"{name:<53} {shown}", flush=True)

    def show(self, name: str, question: str, columns: list[str], rows: list, costs: page.CostsFrom = "formula") -> None:
        page.show(name, question, columns, rows, costs, published=self.options.publish)

    def few(self) -> None:
        """Unseen tables, of a few of the costs that were given: three ways to learn, and what `pretrain` takes of them."""
        if not self.options.costs:
            return
        costs = read_costs(self.options.costs).model_copy(update={"collective": ()})
        rows = labels(rounds_of(costs.compute))
        test = [row for row in rows if row[0].split == "test_tables"]
        others = [row for row in rows if row[0].split != "test_tables"]
        cases, ms = [case for case, _ in test], np.array([cost.total_ms for _, cost in test])
        noise = mape(*collect(costs.compute, lambda cost: cost.total_ms).twice)
        shown = []
        for count in self.options.few:
            if count > len(others):
                print(f"few, {count} cases: only {len(others)} of other tables were measured")
                continue
            found = []
            for draw in range(self.options.draws):
                rng = np.random.default_rng([draw, count])
                some = [others[place] for place in rng.permutation(len(others))[:count]]
                found.append(self.learned(costs.model_copy(update={"compute": tuple(some)}), cases, ms))
                self.say(f"few, {count} cases, draw {draw}", **found[-1])
            means = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
            self.say(f"few, {count} cases, mean", **means)
            shown.append([f"{count:,}", *(f"{means[name]:.1%}" for name in ("paper", "analytic", "net", "taken")),
                          f"{sum(one['analytic_taken'] for one in found):.0f} of {len(found)}"])  # fmt: skip
        self.show(
            "cost-few",
            f"How much is learned from little? Error on {len(cases):,} measured sets of tables never seen, batch "
            f"{costs.bench.batch_size:,}, mean of {self.options.draws} draws; labels repeat to {noise:.1%}.",
            [
                "measured cases",
                "neuroshard-2023",
                "scaled analytic model",
                "our net",
                "what pretrain takes",
                "analytic taken",
            ],
            shown,
            "measured",
        )

    def learned(self, costs: Costs, cases: list, ms: np.ndarray) -> dict[str, float]:
        """Error on these cases, measured as `ms`: of the paper's net, of the scaled analytic model, of our net, and of what
        `pretrain` takes by held-out cases."""
        said = self.paper_says(list(costs.compute), cases)
        taken = pretrain(costs)
        analytic_taken = taken.report.compute_stands_in or any(
            "compute" in line for line in taken.report.datasheet_better
        )
        own = pretrain(costs, epochs=EPOCHS) if analytic_taken else taken
        return {
            "paper": scores(said, ms)[0],
            "analytic": sets_error(costs, cases, ms),
            "net": scores(predicted(own, cases), ms)[0],
            "taken": scores(predicted(taken, cases), ms)[0],
            "analytic_taken": float(analytic_taken),
        }

    def measured(self) -> None:
        """Unseen tables, of the costs that were given: the paper's nets, ours, and ours in which a table may lower a cost."""
        if not self.options.costs:
            return
        costs = read_costs(self.options.costs).model_copy(update={"collective": ()})
        rows = labels(rounds_of(costs.compute))
        test = [row for row in rows if row[0].split == "test_tables"]
        measured = np.array([cost.total_ms for _, cost in test])
        mape, tau = scores(self.paper_says(rows, [case for case, _ in test]), measured)
        self.say("compute, unseen tables, paper", mape=mape, tau=tau, epochs=self.options.paper_epochs)
        shown = [["neuroshard-2023", f"{mape:.1%}", f"{tau:.3f}", "-", "-"]]
        for kind, monotone in (("ours", True), ("ours, free", False)):
            began = time.process_time()
            net = pretrain(costs, monotone=monotone).report.nets[0]
            seconds = time.process_time() - began
            errors, noise = net.splits["test_tables"], net.label_noise
            share, repeats = net.coverage["test_tables"].share, f"{noise.mape:.1%}" if noise else "-"
            if monotone:
                shown.append(["ours", f"{errors.mape:.1%}", f"{errors.kendall_tau:.3f}", repeats, f"{share:.0%}"])
            self.say(
                f"compute, unseen tables, {kind}", mape=errors.mape, tau=errors.kendall_tau, cpu_s=seconds,
                label_noise=noise.mape if noise else None, within_1_sigma=share,
                unseen_sets=net.splits["test_sets"].mape, tested=errors.values,
            )  # fmt: skip
        asked = f"{len(rows):,} measured sets of {len(costs.tables) or len(self.tables):,} tables"
        self.show(
            f"cost-measured-{len(rows):04d}",
            f"How far off is compute on tables never seen? {asked}, batch {costs.bench.batch_size:,}.",
            ["nets", "error", "Kendall τ", "noise of the labels", "within one deviation"],
            shown,
            "measured",
        )

    def paper_says(self, rows: list, cases: list) -> np.ndarray:
        """What the paper's net, trained on these rows by its recipe, says of the cases, in ms."""
        torch.manual_seed(0)
        kept = [row for row in rows if row[0].split in ("train", "valid")]
        inputs, scale = paper.padded([case for case, _ in kept])
        labels = torch.tensor([cost.total_ms for _, cost in kept])
        train, valid = (
            torch.tensor([i for i, row in enumerate(kept) if row[0].split == s]) for s in ("train", "valid")
        )
        net = paper.train(paper.SumNet(), inputs, labels, train, valid, self.options.paper_epochs)
        with torch.no_grad():
            return net(*paper.padded(cases, scale)[0]).double().numpy()

    def curves(self) -> None:
        """The target itself: cases to the error of 4,000 random ones, by our nets and by the paper's, on tables, cases and seeds
        of several draws."""
        tables = pool("meta", self.options.tables_dir) if self.options.tables_dir else self.tables
        sizes, acquired = self.options.sizes, self.options.acquired
        points: list[Point] = []
        for draw in range(self.options.draws):
            for point in curve(
                tables,
                draw,
                sizes,
                acquired,
                self.options.curve_epochs,
                self.labelled,
                lambda costs, test: self.paper_says([*costs.compute], test),
            ):
                points.append(point)
                name = f"curve, draw {draw}, {point.chosen}, {point.cases} cases"
                self.say(name, plans=point.plans, sets=point.sets)
        shown = []
        for chosen, counts in (("random", sizes), ("paper", [min(AIM, max(sizes))]), ("acquired", acquired)):
            for cases in counts:
                those = [point for point in points if (point.chosen, point.cases) == (chosen, cases)]
                errors = {test: float(np.mean([getattr(point, test) for point in those])) for test in TESTS}
                self.say(f"curve, mean, {chosen}, {cases} cases", **errors)
                shown.append([f"{cases:,}", chosen, *(f"{errors[test]:.2%}" for test in TESTS)])
        self.show(
            "cost-cases",
            f"How many cases are enough? Error on devices of plans and on random sets, mean of {self.options.draws} draws.",
            ["cases", "drawn", "devices of plans", "random sets"],
            shown,
        )
        aims = [("random", "paper"), *[("acquired", "random"), ("acquired", "paper")] * bool(acquired)]
        for test in TESTS:
            for chosen, beside in aims:
                found = [needed(points, draw, test, chosen, beside) for draw in range(self.options.draws)]
                median = float(np.median([np.inf if cases is None else cases for cases in found]))
                self.say(f"curve, {chosen} cases to the error of {beside}, {test}", median=median, each=found)

    def transfer(self) -> None:
        """A model of one hardware as the start on another: error by the number of its cases."""
        source = pretrain(self.labelled(self.sets(400 if self.options.quick else 4000, seed=300)))
        with other_hardware():
            test = self.sets(1000, seed=301, split="test_sets")
            truth = np.array([formula.compute_ms(case.tables, BENCH.batch_size) for case in test])
            cases = self.sets(1600, seed=302)
            off, _ = scores(predicted(source, test), truth)
            self.say("transfer, the first hardware's model as it is", mape=off)
            shown = []
            for size in (50, 100, 200) if self.options.quick else (100, 200, 400, 800, 1600):
                costs = self.labelled(cases[:size])
                anew, _ = scores(predicted(pretrain(costs), test), truth)
                begun, _ = scores(predicted(pretrain(costs, start=source), test), truth)
                self.say(f"transfer, {size} cases", anew=anew, started=begun)
                shown.append([f"{size:,}", f"{anew:.2%}", f"{begun:.2%}"])
        self.show(
            "cost-transfer",
            "How many cases does new hardware need? Error by the number of its cases.",
            ["cases", "trained anew", "started from another hardware's model"],
            shown,
        )

    def plans(self) -> None:
        """Error on the device sets of plans, with cases drawn at random alone and as they are drawn by default."""
        if self.options.tables_dir is None:
            print("plans: give --tables-dir, a folder of public table sets")
            return
        tables, counts, shown = pool("meta", self.options.tables_dir), (4, 8, 16), []
        asked: tuple[tuple[str, dict[str, Any]], ...] = (("random sets alone", {"plan_share": 0.0}), ("as drawn", {}))
        for name, more in asked:
            cases = augment(
                tables,
                AugmentSettings(
                    compute_cases=self.options.plan_cases,
                    collective_cases=900,
                    devices=counts,
                    memory_bytes=MEMORY,
                    seed=0,
                    **more,
                ),
            )
            began = time.process_time()
            model = pretrain(labels_of(cases))
            net, seconds = model.report.nets[0], time.process_time() - began
            self.say(
                f"plans, {name}, unseen",
                sets=net.splits["test_sets"].mape,
                tables=net.splits["test_tables"].mape,
                cpu_s=seconds,
            )
            for devices in counts:
                for kind, figures in errors_on_plans(model, devices, self.options.plan_tasks, self.options.tables_dir):
                    self.say(f"plans, {name}, {devices} devices, {kind}", **figures)
                    if name == "as drawn":
                        signed = [f"{figures[key]:+.1%}" for key in ("slowest", "cost")]
                        shown.append([kind, str(devices), *signed, f"{figures['mape']:.1%}"])
        self.show(
            "cost-plans",
            f"How far off is a plan's predicted cost? Nets of {self.options.plan_cases:,} cases of {len(tables):,} tables.",
            ["plans of", "devices", "slowest device", "plan's cost", "all devices, absolute"],
            sorted(shown, key=lambda row: (row[0], int(row[1]))),
        )

    def sets(self, count: int, seed: int, split: str = "train", **more: Any) -> list[Any]:
        """Sets of all tables, as `augment` draws those to train on or to test with."""
        facts = {
            "collective_cases": 0,
            "devices": (4,),
            "memory_bytes": MEMORY,
            "max_tables": 15,
            "test_share": 0.0,
            **more,
        }
        share = 0.8 if split == "train" else 0.1
        settings = AugmentSettings(compute_cases=round(count / share) + 8, seed=seed, **facts)
        drawn = augment(self.tables, settings).compute
        return [case for case in drawn if case.split == split][:count]

    def labelled(self, cases: list) -> Costs:
        """A tenth of them to hold back."""
        rng = np.random.default_rng(1)
        split = [case.model_copy(update={"split": "valid"}) if i % 10 == 9 else case for i, case in enumerate(cases)]
        return Costs(
            bench=BENCH, compute=tuple((case, compute_cost(case, rng, NOISE)) for case in split), collective=()
        )


def labels_of(cases: Cases) -> Costs:
    """As the synthetic backend would measure them."""
    rng = np.random.default_rng(0)
    return Costs(
        bench=BENCH,
        compute=tuple((case, compute_cost(case, rng, NOISE)) for case in cases.compute),
        collective=tuple((case, collective_cost(case, rng, NOISE)) for case in cases.collective),
    )


def scores(said: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    return float(np.abs(said / truth - 1).mean()), float(kendalltau(said, truth).statistic)


@contextmanager
def other_hardware():
    """The formula with the constants of a slower device."""
    before = {name: getattr(formula, name) for name in OTHER_HARDWARE}
    for name, value in OTHER_HARDWARE.items():
        setattr(formula, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(formula, name, value)


if __name__ == "__main__":
    main()
