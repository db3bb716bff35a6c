"""First floor: our formats on disk. tables.json, plan.json, constraints.json, Parquet of cases and costs, traces."""
