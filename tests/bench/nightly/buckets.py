"""A bucket for the nights of a place, on a real server that honours conditional writes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from helpers.servers import KEY, SECRET, moto

BUCKET = "plans"


@contextmanager
def bucket() -> Iterator[str]:
    """A new bucket, which AWS_ENDPOINT_URL leads to. Yields its URL."""
    with moto() as url:
        environment = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": url,
            "AWS_REGION": "us-east-1",
        }
        with patch.dict(os.environ, environment):
            from boto3.session import Session

            Session().client("s3", region_name="us-east-1").create_bucket(Bucket=BUCKET)
            yield f"s3://{BUCKET}"
