"""moto's server on a free port, nearer to S3 in two things: `python moto_atomic.py 127.0.0.1` (or `[::1]`) prints its URL.

Conditional writes are atomic: moto looks and writes without a lock in between. And the ETag of an object that is encrypted with
KMS is not the MD5 of its bytes, but another one every time it is written.
"""

import os
import sys
from threading import Lock
from typing import Any
from uuid import uuid4

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import FakeKey
from moto.s3.responses import S3Response
from werkzeug.serving import make_server

_put, _lock = S3Response._key_response_put, Lock()


def _atomic_put(self: S3Response, *arguments: Any, **options: Any) -> Any:
    with _lock:
        return _put(self, *arguments, **options)


S3Response._key_response_put = _atomic_put

_etag = vars(FakeKey)["etag"].fget


def _opaque_etag(self: FakeKey) -> str:
    if self.encryption == "aws:kms" and self._etag is None:
        self._etag = uuid4().hex
    return str(_etag(self))


FakeKey.etag = property(_opaque_etag)  # type: ignore[assignment]

if __name__ == "__main__":
    host = sys.argv[1]
    server = make_server(host.strip("[]"), 0, DomainDispatcherApplication(create_backend_app), threaded=True)
    os.environ["MOTO_PORT"] = str(server.server_port)
    print(f"http://{host}:{server.server_port}", flush=True)
    server.serve_forever()
