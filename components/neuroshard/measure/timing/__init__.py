"""How a case is timed: clocks, cold caches, repeats, and what both labels (table sets, all-to-alls) are made of."""
