"""Checkpoints in folders beside each other, as `model/` and `optimizer/`, read as one. Needs torch.

What was saved in FOLDER/model is at the key "model" then, as if {"model": …, "optimizer": …} had been saved in FOLDER.
"""

from collections.abc import Collection
from copy import copy
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

METADATA_FILE = ".metadata"  # that torch.distributed.checkpoint writes last


def is_there(reader: FileSystemReader) -> bool:
    """Whether a checkpoint is where the reader reads."""
    return reader.fs.exists(reader.fs.concat_path(reader.path, METADATA_FILE))


def parts_of(reader: FileSystemReader, among: Collection[str] | None = None) -> list[str]:
    """The folders in it that have a checkpoint each, by name, in order; only those `among` these names, if given."""
    try:
        listed = reader.fs.ls(reader.path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = {str(path).rstrip("/").rpartition("/")[2] for path in listed}
    return sorted(name for name in names if (among is None or name in among) and is_there(_of_part(reader, name)))


def _of_part(reader: FileSystemReader, name: str) -> FileSystemReader:
    part = copy(reader)
    part.path = reader.fs.concat_path(reader.path, name)
    return part


class Together(FileSystemReader):
    """What `reader` reads of these parts of its folder."""

    def __init__(self, reader: FileSystemReader, parts: list[str]) -> None:
        vars(self).update(vars(reader))  # of a class for S3, say, its file system
        self.parts = parts

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        whole = Metadata({}, {}, {})
        for name in self.parts:
            part = FileSystemReader.read_metadata(_of_part(self, name), *args, **kwargs)
            paths = dict(part.planner_data or {})
            for key, value in part.state_dict_metadata.items():
                whole.state_dict_metadata[f"{name}.{key}"] = value
                whole.planner_data[f"{name}.{key}"] = (name, *paths.get(key, (key,)))
            for index, info in part.storage_data.items():
                whole.storage_data[replace(index, fqn=f"{name}.{index.fqn}")] = replace(
                    info, relative_path=f"{name}/{info.relative_path}"
                )
            whole.storage_meta = part.storage_meta
        return whole
