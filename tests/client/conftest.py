"""Imports TorchRec once: it and FBGEMM warn about themselves while they are imported."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrec  # noqa: F401
