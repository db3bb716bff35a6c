"""Room 4: a sharding task and a cost model -> a plan.

Proposers make plans, local search improves them, cuts that cost little to undo are undone, and a bound says what is left.

    run.py              search(task, cost_model) -> Plan: its options as arrays, an algorithm's plan, laid out, priced and bounded
    algorithms.py       local search, the published search, heuristics: the order of the steps is decided here, nowhere below
    asked.py            what is asked of a search, in one value that its steps hand on
    settings.py         what a caller may ask for
    tuning.py           every constant that steers a search, and a switch for each of its parts
    watch.py            the clock: progress, improvements, when to stop
    notes.py            what a plan's notes say
    copies.py           which tables every device may copy, and what a plan says of them

    problem/            the task's sharding options as arrays
      column_shards.py  placed options: the column shards of table groups, each on one device
      spread.py         spread options: a piece on every device of a set, an enumerator for each kind
      problem.py        both, priced by the cost model, with some groups spread already
      launches.py       what operators and collectives beyond the first take
      state.py          one plan, priced
      plans.py          several plans, changed in lockstep
      objective.py      the soft maximum that local search makes smaller
      filling.py        place what found no room, cut to fill the devices
      current.py        the current plan, and the bytes that another one moves
      kept_cuts.py      the same with its column cuts kept, so that optimizer state can be loaded
      changes.py        what changed in the task since the current plan
      layout.py         a placement -> Plan

    proposers/          who proposes plans
      greedy.py         the costliest shard first, on the cheapest device; in lockstep.py, with splits.py
      beam.py           the search of the NeuroShard paper, as published: an algorithm of its own
      spread.py         plans with some tables row-wise, or copied
      baselines.py      the heuristics that need no cost model
      current.py        from the current plan

    improve/            how a plan is improved
      local_search.py   descend, perturb or toggle, descend again, keep the best
      descent.py        move by move to a local optimum
      neighborhood.py   what devices hold, and an estimate of what it adds elsewhere
      candidates.py     the best moves of a shard, or of a part of it, by a linear estimate
      swaps.py          the best swaps
      moves.py          what a move changes, by the cost model
      perturb.py        place some table groups anew
      toggle.py         spread a table, or stop spreading it
      fewer_cuts.py     join shards of a table where that costs little; which plan to take then

    infeasible/         whether anything fits at all, and what would help: feasibility.py, packing.py, hints.py
    bound/              what no plan can cost less than: lower_bound.py explains the proof, settings.py has its switches

To add a proposer: a module in proposers/ with a function that makes plans of a problem, a switch in tuning.py, and a place in
algorithms.py where it is asked: `_proposed` for plans that local search starts from.
"""
