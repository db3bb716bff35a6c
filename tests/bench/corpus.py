"""The corpus of sharding tasks, searched in this tree and in another commit's, side by side: are the plans the same, and what do
they take?

    make bench-corpus ARGS="--against COMMIT"      (--only TEXT: tasks with it in their name; --quick: every eighth; --repeats 3)

Both trees are run by this interpreter, each in a process of its own, in turns. Without --against, this tree alone. A task is
`bench/comparing/tasks.py`'s. The other tree makes the previous plans, which both start from. CPU seconds are the fewest of the
repeats, of one thread; peak memory is what a search adds to a process that has imported all.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.comparing.tasks import TASKS, Task

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "bench" / "comparing" / "worker.py"
SMALL_MIB = 8  # peaks below it are not compared one by one
Answer = dict[str, Any]


class Tree:
    """A worker on a tree's package: it answers task by task."""

    def __init__(self, tree: Path, folder: Path) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment = {**os.environ, **threads, "PYTHONPATH": str(tree / "components"), "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        package = self._read()["package"]
        if not Path(package).is_relative_to(tree):
            sys.exit(f"{tree} has no package of its own: {package} was imported instead")

    def answer(self, task: Task, what: str = "answer") -> Answer:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, task.name]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Answer:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            sys.exit(f"a worker ended by itself, with status {self._process.wait()}; what it said is above")
        found: Answer = json.loads(line)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The package as it is in a commit, in a folder that goes when it is done with."""
    with tempfile.TemporaryDirectory(prefix="neuroshard-corpus-") as folder:
        archive = subprocess.run(["git", "archive", commit, "components"], cwd=ROOT, capture_output=True)
        if archive.returncode:
            sys.exit(f"git has no commit {commit!r} with components/: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder).resolve()


def answers(trees: Sequence[Tree], task: Task, repeats: int, turn: int) -> list[Answer]:
    """What each tree says of the task, and the least that it took. The first makes the previous plan; `turn` says who begins."""
    if task.before is not None and "failed" in (made := trees[0].answer(task, "before")):
        return [made for _ in trees]
    found: list[Answer] = [{} for _ in trees]
    for repeat in range(repeats):
        for place in range(len(trees)) if (turn + repeat) % 2 == 0 else reversed(range(len(trees))):
            again = trees[place].answer(task)
            for key in ("cpu_s", "peak_mib"):
                if key in again and key in found[place]:
                    again[key] = min(again[key], found[place][key])
            found[place] = again
    return found


def verdict(answer: Answer) -> str:
    if "failed" in answer:
        return f"failed: {answer['failed']}"
    return f"refused: {answer['refused']}: {answer['message']}" if "refused" in answer else "a plan"


def as_named(task: Task, answer: Answer) -> bool:
    """Whether it is a plan whose bound holds, or the refusal that the task names."""
    if task.refused:
        kind, *named = task.refused
        return answer.get("refused") == kind and all(fact in answer["message"] for fact in named)
    return "cost_ms" in answer and (answer["bound_ms"] or 0) <= answer["cost_ms"] * (1 + 1e-9)


def difference(task: Task, was: Answer, now: Answer) -> list[str]:
    """What differs between the answers of two trees, in words."""
    kinds = [answer.get("refused", "failed" if "failed" in answer else "a plan") for answer in (was, now)]
    if kinds[0] != kinds[1] or "failed" in was:
        return [f"{verdict(was)} -> {verdict(now)}"] if verdict(was) != verdict(now) else []
    if "refused" in was:
        return [] if was["facts"] == now["facts"] else [f"other facts: {was['message']} -> {now['message']}"]
    if task.timed:
        return []
    found = []
    if was["cost_ms"] != now["cost_ms"]:
        found.append(f"cost {now['cost_ms'] / was['cost_ms'] - 1:+.3%}")
    found += [f"other {key}" for key in ("shards", "wire", "notes") if was[key] != now[key]]
    if was["bound_ms"] != now["bound_ms"]:
        found.append(f"bound {was['bound_ms']} -> {now['bound_ms']}")
    return found


def alike(was: Answer, now: Answer) -> bool:
    """Whether both made a plan, or refused it alike: so what they took can be compared."""
    return "cpu_s" in was and "cpu_s" in now and was.get("refused") == now.get("refused")


def summary(tasks: Sequence[Task], pairs: Sequence[tuple[Answer, Answer]]) -> str:
    """One line on all tasks that both trees answered."""
    equal = sum(not difference(task, *pair) for task, pair in zip(tasks, pairs, strict=True))
    costs = [
        now["cost_ms"] / was["cost_ms"] - 1
        for task, (was, now) in zip(tasks, pairs, strict=True)
        if not task.timed and "cost_ms" in was and "cost_ms" in now
    ]
    measured = [pair for task, pair in zip(tasks, pairs, strict=True) if not task.timed and alike(*pair)]
    was_s, now_s = (sum(pair[side]["cpu_s"] for pair in measured) for side in (0, 1))
    was_mib, now_mib = (sum(pair[side]["peak_mib"] for pair in measured) for side in (0, 1))
    memory = now_mib / max(was_mib, 1e-9)
    mean, worst = (sum(costs) / len(costs), max(costs)) if costs else (0.0, 0.0)
    ratio = [(now["peak_mib"] / was["peak_mib"]) for was, now in measured if was["peak_mib"] > SMALL_MIB]
    return (
        f"{equal} of {len(pairs)} equal; cost {mean:+.3%} in the mean, {worst:+.3%} at worst; CPU {was_s:.1f} -> {now_s:.1f} s, "
        f"x {now_s / max(was_s, 1e-9):.2f}; peak memory x {memory:.2f}, at worst x {max(ratio, default=1):.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="compare with the package of this commit")
    parser.add_argument("--only", default="", metavar="TEXT", help="only tasks with this in their name")
    parser.add_argument("--quick", action="store_true", help="every eighth task")
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="NUMBER", help="times that each task is run in each tree"
    )
    asked = parser.parse_args()
    tasks = [task for task in TASKS[:: 8 if asked.quick else 1] if asked.only in task.name]
    wrong, pairs = 0, []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neuroshard-corpus-")))
        places = [stack.enter_context(checked_out(asked.against))] if asked.against else []
        trees = [Tree(place, folder) for place in (*places, ROOT)]
        for tree in trees:
            stack.callback(tree.close)
        for turn, task in enumerate(tasks):
            found = answers(trees, task, asked.repeats, turn)
            now = found[-1]
            said = [] if as_named(task, now) else ["WRONG"]
            wrong += bool(said)
            if asked.against:
                pairs.append((found[0], now))
                said += difference(task, *pairs[-1]) or ["equal"]
                if (found[0].get("bound_ms") or 0) > found[0].get("cost_ms", float("inf")) * (1 + 1e-9):
                    said.append("the other's bound is above its plan")
                if alike(*pairs[-1]):
                    said.append(f"CPU x {now['cpu_s'] / max(found[0]['cpu_s'], 1e-9):.2f}")
                    if found[0]["peak_mib"] > SMALL_MIB:
                        said.append(f"memory x {now['peak_mib'] / found[0]['peak_mib']:.2f}")
            print(f"{task.name:<40} {figures(now)}  {'; '.join(said)}", flush=True)
    if asked.against:
        print(summary(tasks, pairs))
    if wrong:
        sys.exit(f"{wrong} of {len(tasks)} tasks ended otherwise than they name")


def figures(answer: Answer) -> str:
    """What this tree found, in one piece of a line."""
    if "cost_ms" not in answer:
        return verdict(answer)
    bound = f"{answer['bound_ms'] / answer['cost_ms']:>6.1%}" if answer["bound_ms"] else "     -"
    wire = "" if len(answer["wire"]) == 64 else f", no ShardingPlan: {answer['wire']}"
    took = f"{answer['cpu_s']:5.2f} s {answer['peak_mib']:6.1f} MiB"
    return f"{answer['cost_ms']:9.4f} ms, bound {bound}, {answer['full']:6.1%} full, {took}{wire}"


if __name__ == "__main__":
    main()
