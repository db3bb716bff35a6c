"""Runs tasks of the corpus in the tree that PYTHONPATH names: a name on a line of stdin, an answer as JSON on a line of stdout.

Each task is run in a fork of this process, which has imported all that a search needs: so CPU seconds and memory are those of the
search alone. Only what stays stable is called: `neuroshard.search` and `to_torchrec`.
"""

import json
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.comparing.tasks import GIVEN, H100, TASKS, Task, given_costs, of, tables

REFUSALS = ("UsageError", "InvalidInput", "Infeasible", "NeuroshardError", "TypeError")


def main(folder: Path) -> None:
    """Answer until stdin ends. Previous plans, given costs and constraints lie in `folder`."""
    import neuroshard
    import neuroshard.client.torchrec  # makes ShardingPlans compared too

    by_name = {task.name: task for task in TASKS}
    neuroshard.search(tables(0, 4), H100, **of(2, rounds=1), quiet=True)
    print(json.dumps({"package": neuroshard.__file__}), flush=True)
    for line in sys.stdin:
        what, name = json.loads(line)
        print(forked(make_previous if what == "before" else answer, by_name[name], folder), flush=True)


def forked(run: Any, task: Task, folder: Path) -> str:
    """What `run` returns in a process of its own, as JSON; how it ended where it returned nothing."""
    ours, its = os.pipe()
    if not (child := os.fork()):
        try:
            sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115, the process ends
            said = json.dumps(run(task, folder))
        except BaseException as error:
            said = json.dumps({"failed": f"{type(error).__name__}: {error}"})
        with open(its, "w") as out:
            out.write(said)
        os._exit(0)
    os.close(its)
    with open(ours) as into:
        said = into.read()
    _, status = os.waitpid(child, 0)
    return said or json.dumps({"failed": f"the process ended with status {status}"})


def previous_of(task: Task, folder: Path) -> Path:
    return folder / f"{sha256(task.name.encode()).hexdigest()[:12]}.json"


def make_previous(task: Task, folder: Path) -> dict[str, Any]:
    """Write the previous plan of a task: of its search with other options, and without tables that are new since."""
    import neuroshard

    taken = {name: value for name, value in task.asked().items() if name not in ("move_budget", "keep_optimizer_state")}
    old = task.tables[: len(task.tables) - task.new]
    neuroshard.search(old, task.model, **{**taken, **(task.before or {})}, out=previous_of(task, folder), quiet=True)
    return {}


def answer(task: Task, folder: Path) -> dict[str, Any]:
    """What a search finds, and takes."""
    import neuroshard

    asked = task.asked()
    if task.before is not None:
        asked = {**asked, "previous": previous_of(task, folder)}
    if "constraints" in asked:
        (folder / "constraints.json").write_text(json.dumps(asked["constraints"]))
        asked = {**asked, "constraints": folder / "constraints.json"}
    model = task.model
    if model == GIVEN:
        costs = folder / "costs.json"
        costs.write_text(json.dumps(given_costs(task.tables)))
        model = GIVEN.format(folder=folder)
    before_kib = resident()["anon"]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    began = time.process_time()
    try:
        plan = neuroshard.search(task.tables, model, **asked, quiet=True)
    except (neuroshard.NeuroshardError, TypeError) as error:
        kind = next(one.__name__ for one in type(error).__mro__ if one.__name__ in REFUSALS)
        found: dict[str, Any] = {"refused": kind, "message": str(error), "facts": facts(str(error))}
    else:
        found = {
            "shards": sha256(repr(sorted(shard.model_dump_json() for shard in plan.shards)).encode()).hexdigest(),
            "cost_ms": plan.cost_ms,
            "bound_ms": plan.lower_bound_ms,
            "notes": [*plan.provenance.notes, *plan.bound_assumptions],
        }
    found["cpu_s"] = time.process_time() - began
    now = resident()
    found["peak_mib"] = max(0, now["peak"] - now["file"] - before_kib) / 1024
    if "refused" not in found:
        found["full"] = max(
            used / limit for used, limit in zip(plan.memory_bytes(), plan.task.device_memory_bytes, strict=True)
        )
        found["wire"] = wire(plan) if "torchrec" in sys.modules else ""
    return found


def resident() -> dict[str, int]:
    """KiB of this process: the peak, and now of files and of nothing."""
    status = Path("/proc/self/status").read_text()
    names = {"peak": "VmHWM", "file": "RssFile", "anon": "RssAnon"}
    return {name: int(re.search(rf"{key}:\s+(\d+)", status)[1]) for name, key in names.items()}


def facts(message: str) -> list[str]:
    """Numbers, quoted text, options and names of tables in a message."""
    return sorted({*re.findall(r"'[^']*'|--[a-z-]+|\bt\d+\b|\d[\d,.]*\d|\d", message)})


def wire(plan: Any) -> str:
    """The digest of the ShardingPlan that TorchRec gets, or why it gets none."""
    from neuroshard.client.torchrec import to_torchrec

    how: dict[str, Any] = {"device_type": "cuda", "world_size": plan.task.devices, "any_output_order": True}
    how["local_world_size"] = plan.task.topology.local_world_size if plan.task.topology else plan.task.devices
    if groups := plan.task.groups:
        how |= {"world_size": groups.ranks, "sharding_group_size": plan.task.devices}
        how["local_world_size"] = groups.local_world_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = to_torchrec(plan, module(plan.task.tables), **how)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return sha256("\n".join(sorted(lines(made.plan))).encode()).hexdigest()


def lines(modules: Any) -> Iterator[str]:
    for path, held in modules.items():
        for name, sharding in held.items():
            yield f"{path} {name} {sharding!r}"


def module(some: Any) -> Any:
    """A model that has the tables, on no device."""
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
    from torchrec.modules.embedding_configs import DataType, PoolingType

    collections: dict[str, list[Any]] = {}
    for table in some:
        path = table.module or ("weighted" if table.weighted else "pooled")
        dtype = DataType.FP16 if table.element_bytes == 2 else DataType.FP32
        fields: dict[str, Any] = {"num_embeddings": table.rows, "embedding_dim": table.dim, "data_type": dtype}
        fields |= {"name": table.name, "feature_names": [one.name for one in table.features] or [table.name]}
        if table.pooling != "none":
            fields["pooling"] = PoolingType.MEAN if table.pooling == "mean" else PoolingType.SUM
        collections.setdefault(path, []).append(
            (EmbeddingConfig if table.pooling == "none" else EmbeddingBagConfig)(**fields)
        )
    made = {
        path: EmbeddingCollection(tables=held, device="meta")
        if type(held[0]) is EmbeddingConfig
        else EmbeddingBagCollection(tables=held, is_weighted=path == "weighted", device="meta")
        for path, held in collections.items()
    }
    return torch.nn.ModuleDict(made)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
