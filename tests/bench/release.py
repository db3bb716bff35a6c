"""How long a trainer waits for its plan, as a table. Attacks on stores and releases are tests (tests/deploy, tests/store).

make bench-release            (with trainer.py, a trainer's steps by several planners' plans)
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.publishing import page
from neuroshard.core.units import format_bytes


def main() -> None:
    options = page.asked(page.parser(__doc__, "the same: it takes half a minute"))
    with tempfile.TemporaryDirectory() as folder:
        rows = [(name, measure(Path(folder) / "large")) for name, measure in WAITING.items()]
    question = "How long does a trainer wait for its plan?"
    page.show("release-time", question, ["", "found"], rows, "none", published=options.publish)


LARGE = """
import json, re, sys, time, warnings
warnings.simplefilter("ignore")
from datetime import UTC, datetime
from pathlib import Path
step, root = sys.argv[1], Path(sys.argv[2])
sys.path.insert(0, sys.argv[3])
if step == "publish":
    from helpers.plans import NOW, make_plan
    from neuroshard.core.table import Table
    from neuroshard.core.plan import Plan, Shard
    from neuroshard.core.task import ShardingTask
    from neuroshard.deploy.run import deploy
    from neuroshard.store.folder import FolderStore
    tables = tuple(Table(name=f"table_{i}", rows=10_000, dim=128, pooling_factor=1 + i % 40) for i in range(2000))
    shards = tuple(
        Shard(table=t.name, rows=t.rows, column_offset=c, dim=64, device=(2 * i + c // 64) % 128)
        for i, t in enumerate(tables) for c in (0, 64)
    )
    task = ShardingTask(tables=tables, device_memory_bytes=(2**30,) * 128, batch_size=65536)
    plan = Plan(task=task, shards=shards, predicted_ms=(1.0,) * 128, provenance=make_plan().provenance)
    began = time.perf_counter()
    deploy(plan, FolderStore(root), "m", now=datetime(2025, 11, 20, tzinfo=UTC))
else:
    from neuroshard.client import load_plan
    if step == "to_torchrec":
        import torch
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from neuroshard.client.torchrec import to_torchrec
        plan = load_plan(str(root), "m", cache_dir=False)
        module = EmbeddingBagCollection(device=torch.device("meta"), tables=[
            EmbeddingBagConfig(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name])
            for t in plan.task.tables])
        began = time.perf_counter()
        to_torchrec(plan, module, device_type="cuda", local_world_size=8, world_size=128)
    else:
        began = time.perf_counter()
        load_plan(str(root), "m", cache_dir=False, world_size=128)
seconds = time.perf_counter() - began
peak = re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())  # ru_maxrss would count the parent's
print(json.dumps({"seconds": seconds, "bytes": 1024 * int(peak[1])}))
"""


def large(root: Path) -> str:
    """Each step in a process of its own, so that its peak memory is its own; the best of three loads."""
    figures = []
    for step, times in (("publish", 1), ("load", 3), ("to_torchrec", 1)):
        runs = [
            json.loads(
                subprocess.run(
                    [sys.executable, "-c", LARGE, step, str(root), str(Path(__file__).parents[1])],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout.splitlines()[-1]
            )
            for _ in range(times)
        ]
        best = min(runs, key=lambda run: run["seconds"])
        figures.append(f"{step} {best['seconds']:.2f} s, {format_bytes(best['bytes'])}")
    size = next((root / "m" / "plans").glob("*.json")).stat().st_size
    return f"plan of {format_bytes(size)}: " + "; ".join(figures) + " (peak memory of the whole process)"


def imported(_: Path) -> str:
    """The client in a fresh interpreter, ten times: by the clock, and what it computes, whatever else the machine does."""
    script = (
        "import time; a, b = time.perf_counter(), time.process_time(); from neuroshard.client import load_plan; print("
    )
    script += "time.perf_counter() - a, time.process_time() - b)"
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True) for _ in range(10)
    ]
    seconds, computed = zip(*(map(float, run.stdout.split()) for run in runs), strict=True)
    return f"median {median(seconds):.2f} s, best {min(seconds):.2f} s; median of CPU time {median(computed):.2f} s"


WAITING: dict[str, Callable[[Path], str]] = {
    "2,000 tables, 128 ranks": large,
    "from neuroshard.client import load_plan": imported,
}

if __name__ == "__main__":
    main()
