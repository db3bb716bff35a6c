"""The constants that steer a search and the switches that leave out its parts, in one frozen value.

Every module reads them from `problem.tuning`. `search(..., tuning=replace(TUNING, swaps=False))` searches without swaps, and
`make bench-search ARGS="--only ablation,ablation-hosts"` does so with every switch and prints what each part earns.
"""

from dataclasses import dataclass

from neuroshard.core.errors import UsageError


@dataclass(frozen=True)
class BeamWidth:
    """How wide and deep the published search goes: N, K, L and M of the NeuroShard paper (arXiv 2305.01868)."""

    candidates: int = 10  # N: shards that are split at each level, the costliest N and the largest N
    beam: int = 3  # K: shard lists kept at each level
    depth: int = 10  # L: levels of splits
    grid: int = 11  # M: caps on the columns of a device

    def check(self) -> None:
        """Raise UsageError where one of them is too small to search at all."""
        for name, least in (("candidates", 1), ("beam", 1), ("depth", 0), ("grid", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, not {getattr(self, name)}")


PAPER = BeamWidth()


@dataclass(frozen=True)
class TimeShares:
    """Of the time that is left of a budget, what a step may spend at most where others follow. Each is a guess."""

    first_plans: float = 0.5  # descending from the first of them, before those with rows split are made
    without_cuts: float = 0.5  # plans without cuts, before those with some
    without_copies: float = 0.5  # plans without copies, before those with some
    from_rows: float = 0.5  # going on from plans with rows split, before the others
    until_cuts: float = 0.85  # everything before cuts are undone
    in_hbm: float = 0.5  # plans in HBM, before those beyond it
    relaxation: float = 0.4  # the relaxation in which a part of a table is in any tier
    uneven: float = 0.5  # plans of groups of ranks, before evener ones
    halves: float = 0.5  # sequences in halves, before another number of equal shards, and so on
    as_held: float = 0.5  # hot rows as they are held, before other numbers of them


@dataclass(frozen=True)
class Tuning:
    """Switches first, then constants by the module that reads them. "Share" is a share of a plan's cost unless said.

    What is said to earn or cost so much is the mean change of the plan's cost, by `analytic:h100` where nothing else is said: of
    switches by docs/benchmarks/search-ablation-hosts.json; of constants on 14 drawn tasks (4 to 32 devices, a seed each, where
    another seed changes the mean by 0.04 % and one task by 0.4 %), or on 25 tasks of 3 to 15 heavy tables ("heavy"), or on 30
    tasks that fill 96 to 99.5 % of memory ("tight"). All else is a guess.
    """

    # Switches. Proposers: who contributes plans to start from (algorithms.py asks them).
    # The costliest shard first, on the cheapest device, else plans start from a packing: earns 0.55 %
    greedy: bool = True
    # Plans by bytes and ms where memory is nearly full: 9 % on 4 tasks of 240 tables that fill 97 % of 16 devices column-wise.
    # One by bytes only, where others are too few: without it plans of 21 tasks 95 to 99.5 % full were 39, not 21 % above bounds
    packed: bool = True
    row_wise: bool = True  # plans with some tables row-wise, where the task allows it: without them costs double
    # Plans with copies of small tables, where the task allows it: 12 % on ten worlds (search-hosts.json)
    copies: bool = True
    baselines: bool = True  # the heuristics' plans earn nothing: none of them may be cheaper than the plan found
    # Switches of how plans are improved and chosen.
    column_caps: bool = True  # greedy plans under caps on the columns of a device, not only without: 0.52 %
    # Greedy plans by linear estimates, where the others give too few: 0.55 % tight, at most 3.1 %
    linear_estimates: bool = True
    partial_moves: bool = True  # moves and swaps of a part of a shard: 1.84 %
    swaps: bool = True  # 0.81 %
    perturb: bool = True  # rounds of perturbing and descending again: 0.73 %
    toggle: bool = True  # rounds that spread a table, or no longer: 1.31 %
    # What would help where no plan fits: seconds of trials. A sweep of sizes tries the sizes itself
    hints: bool = True

    # algorithms, settings: how the rounds are spent
    rounds: int = 40  # of perturbing and descending, where the caller gives neither rounds nor a time budget: a guess
    time: TimeShares = TimeShares()
    # On more than 25 devices: rounds, at least a quarter of those asked for, after which no more follow, if they saved less than
    # the least gain in all. Half of the time of all rounds, for 0.02 % (36 searches of 1,000 and 2,000 tables)
    patience: int = 10
    least_gain: float = 1e-4
    # If the first plans with cut tables and those without differ by a smaller share, local search tries both. Trying the cheaper
    # kind alone cost 1 % with pins, at most 5.8 %; from a current plan, trying cuts alone cost 8 %, at most 42 %. 0.1 is a guess
    both_kinds_within: float = 0.1
    # Share by which a first plan may cost more than the cheapest, and is still improved. Of 4 tasks of 1,000 and 2,000 tables no
    # dearer one ended cheapest
    starts_within: float = 1.0
    worth_moving: float = 1e-3  # share that a plan must gain for shards to move: for less, 7.5 GiB moved for nothing

    # run: groups of ranks. What the fullest device holds above the mean in each search for an evener plan, as shares of what it
    # does in the best plan before. Without these, MLPerf's tables and two drawn sets of 30, in groups of 8 of 32 ranks averaged
    # every 10, 100 and 1,000 steps, cost 1.01 to 3.5 times as much. And the share of the cost that averaging evenly must save
    # for them to be made: a guess
    uneven_shares: tuple[float, ...] = (0.5, 0.1)
    worth_averaging_less: float = 0.005

    # problem: how many shards the cost model prices at once
    price_at_once: int = 8_192  # shards in one batch, at most, since larger batches need memory: a guess
    price_all_up_to: int = 1_000  # shards of a task up to which all are priced in the first batch: a guess

    # proposers
    # Greedy plans that local search starts from: it descends from several in the time of one. Where it does not (2,000 tables on
    # 128 devices) from the cheapest alone: the others ended 0 to 0.04 % below. 3 or 12 change nothing (0.00 and 0.02 %)
    greedy_plans: int = 6
    fineness: tuple[float, ...] = (float("inf"), 1.0, 0.8, 0.6)  # mean loads that a shard weighs at most: a guess
    # How often the costliest shard is halved, each time for one more list of shards. 0 costs 0.07 %, and 4 % on one tight task
    halvings: int = 6
    # Equal shards of a device above which they are not halved: 1,000 equal tables on 96 devices took 32 s of CPU, now 2
    halved_each: int = 4
    caps: tuple[float, ...] = (1.04, 1.1, float("inf"))  # columns of a device, as multiples of the mean: a guess
    # As fineness, for linear estimates. On 16 tasks 91 to 99 % full infinity alone cost 0.12 %, three of these 0.09 %
    guessed_fineness: tuple[float, ...] = (float("inf"), 1.0, 0.6, 0.4, 0.25)
    # A device's load is its ms plus its memory with one of these weights, as shares of the mean device's. Ms alone cost 0.45 %
    # tight, memory always 0.13 %
    memory_weights: tuple[float, ...] = (0.0, 0.5, 2.0)
    lockstep_bytes: int = 128 * 2**20  # memory of greedy placements made together in the published search: a guess
    # First plans that are improved before those with rows split are made. For 200 tables on 16 devices it takes 10, 5 and 15 %
    # longer with 1, 3 and 6 to find a plan as cheap as the published search's
    begin_with: int = 2
    # Share of all memory that uncut tables take from which the largest are tried row-wise, and parts of shards swapped for parts:
    # a guess. On 28 tasks of 60 tables that fill 99.5 % of 8 devices, plans were 6.3 % cheaper with these sets and swaps
    nearly_full: float = 0.9
    # Share of a device's memory from which a table counts as large there, and every part of its shards is tried in swaps: a guess
    large: float = 0.02
    # What a device's memory costs there, as a share of what a device takes: without a price, 2 and 7 % on 8 tasks column-wise
    memory_price: float = 0.3
    # Packings there: how much more bytes count than ms in the order of groups, and ms that devices keep below, as multiples of
    # the mean. Of 48 pairs of these, the best first plan is within 2 % of the best of all; with two weights and four levels 5 %
    packed_byte_weights: tuple[float, ...] = (1.0, 4.0, 16.0)
    packed_levels: tuple[float, ...] = (1.0, 1.05, 1.1, 1.2, 1.4, 1.7)
    # Large tables x tables x devices above which not every number of them is tried row-wise: where memory is nearly full, and
    # where tables are larger than a device. 16,000 for both made plans of 240 tables that fill 98.5 % of 16 devices 15 % dearer;
    # 2,000,000 for both took twice the time of 480 tables on 64 devices that are not full
    full_sets_most_cells: int = 2_000_000
    larger_sets_most_cells: int = 16_000
    row_sets: int = 3  # sets of tables tried row-wise, of each order: a guess
    # Tables over all devices, where the others are over those of a domain. Without such sets: 0.36 % heavy, at most 8.7 %
    row_sets_leading: tuple[int, ...] = (1, 2, 3, 5, 8)
    # Tables up to which sets of an order differ by one; beyond, by a fifth of the rest: a guess
    row_sets_one_by_one: int = 12
    # Share by which a set may be estimated to cost more than the cheapest other first plan, and is still tried. Without this
    # limit: the same plans on 160 tasks, 0 to 6 % more time
    row_sets_within: float = 0.1
    row_sets_idle: int = 10  # sets in a row whose plans are no cheaper, after which no others are tried: a guess
    copies_one_by_one: int = 4  # copied tables up to which first plans differ by one, as row_sets_one_by_one: a guess
    # Share that improved plans must save by copies for small tables to be data-parallel: a guess
    copies_worth: float = 0.02

    # improve: the objective and the descent
    sharpness: int = 6  # doublings of the exponent of the soft maximum. 5 saves 0.39 % (one task 6 %), 7 saves 0.10 %
    min_gain: float = 1e-6  # share of the slowest device's ms below which a move gains nothing: a guess
    # Plans that are improved in lockstep, at most: when one is done, another takes its place. 4 take 10 % more time, 8 as much,
    # for the same costs (30 tasks each of 4, 8 and 16 devices, trained nets)
    lockstep_plans: int = 6
    # Devices x tables of these in all: larger arrays take as long one after another: a guess
    lockstep_cells: int = 200_000
    # Devices that a move is tried towards, the least loaded ones: a guess. The others are tried where none of these has room and,
    # from first plans and what a round finds within this share of the cheapest, where none of these gains. Always to try them
    # took 1.5 to 1.6 times as long, for 0.3 %; within half of this share, one of three plans of 2,000 tables was 2.3 % dearer
    receivers: int = 24
    finish_within: float = 0.01
    shards_seen: int = 64  # shards of a device that moves are tried for, drawn at random if it holds more: a guess
    # Shards of the receivers that are weighed for a swap, drawn at random if there are more: a guess
    offers_seen: int = 2_048
    swaps_estimated: int = 24  # swaps of each shard whose gain is estimated in full. 12 cost 0.23 %
    unlevel: float = 0.5  # weight of what a swap leaves two devices apart: a part of a shard may level them. A guess

    # improve: the local search
    # Share by which a local optimum may cost more, and the search still goes on from it. 0 costs 0.03 %
    worse: float = 0.003
    perturb_devices: int = 4  # whose tables are placed anew, at most; at least the slowest and another. 2 cost 0.25 %
    # Share of the tables on these devices. Half of these cost 0.22 %, nearly twice of these nothing
    perturb_share: tuple[float, float] = (0.1, 0.6)
    # They are placed heaviest first, after weights were drawn larger or smaller. Without that: 0.06 % less
    perturb_order: tuple[float, float] = (0.7, 1.4)
    # Of so many a table gets more shards than it needs; plus its share of a mean device's ms. 0 costs 0.02 %
    perturb_cuts_more: float = 0.1
    perturb_most_more: int = 3  # and so many more at most: a guess
    perturb_uneven: float = 0.5  # share of cuts that are at random places, not even: a guess
    # Draws of tables, until those of one find room, since with little memory to spare most find none: a guess
    perturb_tries: int = 3
    toggle_sources: int = 2  # devices, the slowest, whose tables are candidates to be split row-wise: a guess
    toggle_copies: float = 0.5  # share of toggles that copy a table, or no longer, where tables may be copied: a guess
    toggle_candidates: int = 32  # tables considered in one toggle, to split and to split no longer: a guess
    # The table to toggle is at a random place in the order of estimated gain: an exponential draw of this mean, rounded down.
    # Half of it cost 0.38 % heavy, twice of it saved 0.22 %
    toggle_luck: float = 3.0
    joins_priced: int = 2_048  # joins of two shards of a table that are priced, those of the narrowest shards: a guess
    # Single joins that are followed by a descent before no more cuts are undone. Without: 7 % more cuts
    joins_tried: int = 4


TUNING = Tuning()
