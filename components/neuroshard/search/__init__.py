"""Room 4: a sharding task and a cost model -> a plan.

Proposers make plans, local search improves them, one of them is chosen, and a bound says what is left.

    run.py              search(task, cost_model) -> Plan: what comes after what is decided here and nowhere below
    tuning.py           every constant that steers a search, and a switch for each of its parts
    choice.py           which of the plans found to take, under doubt of the cost model
    watch.py            the clock: progress, improvements, when to stop
    night.py            a nightly order -> its plan

    problem/            the task as arrays
      problem.py        table groups and every shard of them by number, priced by the cost model
      row_blocks.py     tables split row-wise over all devices
      state.py          one plan, priced
      plans.py          several plans, changed in lockstep
      objective.py      the soft maximum that local search makes smaller
      filling.py        place what found no room, cut to fill the devices
      current.py        the plan in place, and the bytes that another one moves
      changes.py        what changed in the task since that plan
      layout.py         a placement -> Plan

    proposers/          who proposes plans, behind one interface
      base.py           what a proposer is
      registry.py       all proposers by name
      greedy.py         the costliest shard first, on the cheapest device; in lockstep.py, with splits.py
      beam.py           the search of the NeuroShard paper, as published
      row_wise.py       plans with some tables row-wise
      baselines.py      the heuristics that need no cost model
      current.py        from the plan in place

    improve/            how a plan is improved
      local_search.py   descend, perturb or toggle, descend again, keep the best
      descent.py        move by move to a local optimum
      neighborhood.py   what devices hold, and an estimate of what it adds elsewhere
      candidates.py     the most promising moves of a shard or a part of it
      swaps.py          and swaps
      moves.py          what a move changes, by the cost model
      perturb.py        place some table groups anew
      toggle.py         split a table row-wise, or no longer

    infeasible/         whether anything fits at all, and what would help: feasibility.py, packing.py, hints.py
    bound/              what no plan can cost less than: lower_bound.py tells the proof, settings.py has its switches

To add a proposer: a module in proposers/ with a `propose(problem, request)`, a line in proposers/registry.py, a switch of that
name in tuning.py, and in `run._local_search` the place where it is asked.
"""
