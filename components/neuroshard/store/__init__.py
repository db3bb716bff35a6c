"""First floor: where plans and cost models live: a folder, or S3. No other room imports boto3."""
