"""Room 4: a sharding task and a cost model -> a plan.

Proposers make plans, local search improves them, cuts that cost little to undo are undone, and a bound says what is left.
`run.py` has the verb, `algorithms.py` the order of the steps, `asked.py` what they hand on, `tuning.py` every constant that
steers a search and a switch for each of its parts. Each file says in its first line what it does.

    problem/      the task's sharding options as arrays: placed (column_shards.py) and spread (spread.py, kinds.py); plans' states
    proposers/    who proposes plans
    improve/      how a plan is improved: local_search.py
    infeasible/   whether anything fits at all, and what would help
    bound/        what no plan can cost less than: lower_bound.py explains the proof
    tiers/        which tables lie beyond HBM

To add a proposer: a module in proposers/ with a function that makes plans of a problem, a switch in tuning.py, and a place in
algorithms.py where it is asked: `_proposed` for plans that local search starts from.
"""
