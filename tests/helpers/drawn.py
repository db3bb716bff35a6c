"""Tables drawn at random, and ways to hold them."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from helpers.plans import row_wise
from neuroshard.core.plan import Shard
from neuroshard.core.table import DIM_STEP, Table

WIDEST = 1024  # columns of a shard


def drawn_tables(
    rng: np.random.Generator, count: int, *, rows: tuple[float, float], dims: Sequence[int] = (16, 32, 64, 128)
) -> tuple[Table, ...]:
    """With 10 to the power of `rows` rows, and 1 to 20 lookups."""
    return tuple(
        Table(
            name=f"t{i}",
            rows=int(10 ** rng.uniform(*rows)),
            dim=int(rng.choice(dims)),
            pooling_factor=float(np.exp(rng.uniform(0, 3))),
        )
        for i in range(count)
    )


def drawn_shards(table: Table, devices: int, domain: int, rng: np.random.Generator) -> list[Shard]:
    """A table held in some way that TorchRec has for it, except copied."""
    sequence = table.pooling == "none"
    ways = ["whole", "columns", "turns"]
    rows = table.pooling != "mean" and table.has_rows_for(devices) and devices > 1 and table.dim <= WIDEST
    ways += ["rows"] * rows + ["domain"] * (rows and not sequence and domain < devices)
    parts = [n for n in (2, 4) if devices // domain % n == 0 and table.dim % (4 * n) == 0]
    ways += ["grid"] * ("domain" in ways and len(parts) > 0)
    if table.dim > WIDEST:  # in equal shards
        return cut(table, table.dim // WIDEST, rng.integers(devices, size=table.dim // WIDEST).tolist())
    whole = [Shard(table=table.name, rows=table.rows, dim=table.dim, device=int(rng.integers(devices)))]
    match rng.choice(ways):
        case "rows":
            return list(row_wise(table, devices))
        case "domain":
            first = domain * int(rng.integers(devices // domain))
            return [one.model_copy(update={"device": first + one.device}) for one in row_wise(table, domain)]
        case "grid":
            count = int(rng.choice(parts))
            hosts = range(first := count * int(rng.integers(devices // domain // count)), first + count)
            dim = table.dim // count
            return [
                one.model_copy(update={"dim": dim, "column_offset": dim * part, "device": host * domain + one.device})
                for part, host in enumerate(hosts)
                for one in row_wise(table, domain)
            ]
        case "turns":
            on = rng.integers(devices, size=4 if table.dim % 16 == 0 and not sequence else 2).tolist()
            return cut(table, len(on), on)
        case "columns":
            cuts = 2 if sequence else int(rng.integers(2, min(table.dim // 4, 4) + 1))
            return cut(table, cuts, rng.permutation(max(devices, cuts))[:cuts].tolist()) if cuts <= devices else whole
    return whole


def cut(table: Table, cuts: int, on: Sequence[int]) -> list[Shard]:
    """Column shards as equal as can be, on these devices."""
    ends = [DIM_STEP * (table.dim // DIM_STEP * one // cuts) for one in range(cuts + 1)]
    return [
        Shard(table=table.name, rows=table.rows, column_offset=begin, dim=end - begin, device=device)
        for (begin, end), device in zip(pairwise(ends), on, strict=True)
    ]
