"""pipelines/neuroshard.py -> pipelines/neuroshard.yaml, byte for byte the same wherever it is made.

python -m pipelines.compile           write it
python -m pipelines.compile --check   exit 1 where it does not match its source
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

from kfp import compiler

from pipelines.neuroshard import neuroshard

SDK = re.compile(rb"^sdkVersion: .*$", re.MULTILINE)  # which a newer kfp writes otherwise
PACKAGE = Path(__file__).with_name("neuroshard.yaml")


def compiled() -> bytes:
    """The pipeline as kfp's compiler writes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "neuroshard.yaml")
        compiler.Compiler().compile(neuroshard, str(path))
        return path.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    if not parser.parse_args().check:
        PACKAGE.write_bytes(compiled())
    elif SDK.sub(b"", PACKAGE.read_bytes()) != SDK.sub(b"", compiled()):
        sys.exit(f"{PACKAGE.name} does not match its source; run `make compile` and commit it")


if __name__ == "__main__":
    main()
