"""The front door for trainers: `load_plan(store_url, model)`. Needs pydantic and boto3 only."""
