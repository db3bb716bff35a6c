"""Room 4: sharding task + cost model -> plan."""
