#!/usr/bin/env bash
# One would guess: read_dictionary only asks for another form of a text column, and reads whatever pyarrow can read without it.
# What happens: it reads no column whose pages are in DELTA_BYTE_ARRAY or DELTA_LENGTH_BYTE_ARRAY, encodings that pyarrow itself
# writes and reads well without read_dictionary. It raises an OSError, "Not yet implemented".
# Seen with: pyarrow 26.0.1, on 28 November 2026.
# Why it matters: read_dictionary is what keeps a column of often repeated texts (names of features, of users) small in memory;
# a writer that chooses deltas for texts by itself takes that away, and who catches OSError takes a whole file for a broken one.
#
# Ends with 0 if that holds, with 1 if it changed, with 2 if the packages could not be installed.
set -euo pipefail
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" || exit 2; }
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
install pyarrow==26.0.1

cat > "$work/check.py" <<'END'
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

print(*(f"{name} {version(name)}" for name in ("pyarrow",)), sep=", ")
table = pa.table({"name": [f"feature_{n % 10}" for n in range(1000)]})


def read(encoding, **options):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "names.parquet")
        pq.write_table(table, path, use_dictionary=False, column_encoding={"name": encoding})
        try:
            found = pq.ParquetFile(path, **options).read()
        except OSError as error:
            return "not implemented" if "Not yet implemented" in str(error) else str(error)
    return "read" if found["name"].to_pylist() == table["name"].to_pylist() else "other values"


seen = {
    encoding: (read(encoding), read(encoding, read_dictionary=["name"]))
    for encoding in ("PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY")
}
print("expected: every encoding is read, with read_dictionary and without")
print("seen:", "; ".join(f"{name}: {plain}, with it {with_it}" for name, (plain, with_it) in seen.items()))
without = ("read", "not implemented")
sys.exit([*seen.values()] != [("read", "read"), without, without])
END
"$work/venv/bin/python" -W ignore "$work/check.py"
