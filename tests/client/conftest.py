"""Imports TorchRec once: it and FBGEMM warn about themselves while they are imported. Trainers here are on CPUs."""

import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrec  # noqa: F401


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
