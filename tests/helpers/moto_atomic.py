"""moto's server, with conditional writes that are atomic, as S3's are: moto looks and writes without a lock in between."""

import sys
from threading import Lock
from typing import Any

from moto.s3.responses import S3Response
from moto.server import main

_put, _lock = S3Response._key_response_put, Lock()


def _atomic_put(self: S3Response, *arguments: Any, **options: Any) -> Any:
    with _lock:
        return _put(self, *arguments, **options)


S3Response._key_response_put = _atomic_put  # type: ignore[method-assign]

if __name__ == "__main__":
    main(sys.argv[1:])
