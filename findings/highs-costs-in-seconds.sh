#!/usr/bin/env bash
# One would guess: an exact solver gives the same plan for costs in milliseconds and for the same costs in seconds.
# What happens: with tables that cost a few microseconds, written in seconds (1e-6), HiGHS (scipy.optimize.milp) reports success
# and a gap of 0 for plans that are not the best, and a lower bound above what the best plan costs. In milliseconds it is exact.
# Its tolerances are absolute: what is below about 1e-6 counts as nothing, in an objective as in a constraint.
# Seen with: scipy 1.17.1 (HiGHS inside), numpy 2.4.6, on 29 November 2026.
# Why it matters: sharding plans are compared with a mixed-integer program's, and steps are naturally counted in seconds. Its plan
# then is a poor judge, and its bound a false proof. Scale costs so that the objective is near 1.
#
# Ends with 0 if that holds, with 1 if it changed, with 2 if the packages could not be installed.
set -euo pipefail
export OMP_NUM_THREADS=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" || exit 2; }
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
install scipy==1.17.1 numpy==2.4.6

cat > "$work/check.py" <<'END'
import sys
from importlib.metadata import version
from itertools import product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

print(*(f"{name} {version(name)}" for name in ("scipy", "numpy")), sep=", ")
TABLES, DEVICES, TASKS = 8, 2, 10


def solved(costs):
    """Place each table on one device, so that the slower device is fast: cost of the plan, the solver's bound."""
    last = TABLES * DEVICES  # the variable that is the slower device's cost
    rows, least, most = [], [], []
    for table in range(TABLES):
        row = np.zeros(last + 1)
        row[table * DEVICES : (table + 1) * DEVICES] = 1
        rows, least, most = [*rows, row], [*least, 1], [*most, 1]
    for device in range(DEVICES):
        row = np.zeros(last + 1)
        row[device:last:DEVICES], row[last] = costs, -1
        rows, least, most = [*rows, row], [*least, -np.inf], [*most, 0]
    objective = np.eye(last + 1)[last]
    found = milp(
        objective,
        constraints=LinearConstraint(np.array(rows), least, most),
        integrality=[1] * last + [0],
        bounds=Bounds(0, [1] * last + [np.inf]),
    )
    assert found.status == 0, found.message
    placed = np.round(found.x[:last]).reshape(TABLES, DEVICES)
    return (placed * costs[:, None]).sum(axis=0).max(), found.mip_dual_bound


def best(costs):
    sides = (np.array(side) for side in product((0, 1), repeat=TABLES))
    return min(max(costs[side == 1].sum(), costs[side == 0].sum()) for side in sides)


def worst(unit):
    """Of ten tasks, how far a plan is above the best one, and a bound above it, at most: shares."""
    rng = np.random.default_rng(3)
    tasks = [rng.uniform(1, 9, TABLES) * unit for _ in range(TASKS)]
    found = [(*solved(costs), best(costs)) for costs in tasks]
    return max(cost / least - 1 for cost, _, least in found), max(bound / least - 1 for _, bound, least in found)


print("expected: the best plan, and no bound above it, in every unit; each result is reported as optimal")
seen = {name: worst(unit) for name, unit in {"in us": 1.0, "in ms": 1e-3, "in s": 1e-6}.items()}
for name, (plan, bound) in seen.items():
    print(f"seen: costs {name}: worst plan {plan:.1%} above the best, worst bound {max(bound, 0):.1%} above it")
exact = all(max(seen[name]) < 1e-3 for name in ("in us", "in ms"))
sys.exit(not (exact and min(seen["in s"]) > 0.01))
END
"$work/venv/bin/python" -W ignore "$work/check.py"
