"""Other people's formats -> our tables: dlrm_datasets, TorchRec models, planner printouts, JSON, CSV and Parquet."""
