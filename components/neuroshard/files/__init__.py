"""First floor: bytes on disk. tables.json, plan.json, Parquet of cases and costs, traces."""
