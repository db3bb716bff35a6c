"""A bench begins anew where it needs environment variables that are read when a process starts."""

import os
import sys
from collections.abc import Mapping


def restart_with(environment: Mapping[str, str]) -> None:
    """Start this script again with these variables, unless it has them."""
    if not environment.items() <= os.environ.items():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **environment})
