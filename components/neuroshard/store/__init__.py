"""First floor: where plans and cost models live: a folder, or S3 (the only importer of boto3)."""
