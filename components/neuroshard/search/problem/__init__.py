"""A sharding task as arrays: table groups, shards, row blocks, plans and what they cost, and the current plan."""
