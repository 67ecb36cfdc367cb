"""Values of a file that is about to be written: tensors that are read, in pieces, when their turn comes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ruda_ds.checkpoint.manifest import FileEntry
from ruda_ds.checkpoint.pickles import LazyTensor, StoredTensor
from ruda_ds.checkpoint.recipes import CHUNK

Advance = Callable[[int], None]


@dataclass(frozen=True)
class TargetFile:
    """A file of the target.

    Attributes:
        name: in the tag.
        nbytes: of its tensors.
        tensors: how many.
        write: (folder, advance) -> size and checksum; ``advance`` is told bytes as they are written.
    """

    name: str
    nbytes: int
    tensors: int
    write: Callable[[Path, Advance], FileEntry]


def pieces(read: Callable[[int, int], torch.Tensor], begin: int, end: int) -> Iterator[torch.Tensor]:
    """Elements begin..end of what ``read`` (start, count) gives, a bounded number at a time."""
    for start in range(begin, end, CHUNK):
        yield read(start, min(CHUNK, end - start))


def zeros(count: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Zeros, a bounded number at a time."""
    return pieces(lambda start, count: torch.zeros(count, dtype=dtype), 0, count)


def lazy(value: Any) -> Any:
    """The same with StoredTensors as LazyTensors, so that they are read when they are written."""
    if isinstance(value, StoredTensor):
        whole = torch.empty(value.shape, device="meta").as_strided(value.shape, value.stride)
        if whole.is_contiguous():
            return LazyTensor(value.shape, value.dtype, lambda: pieces(value.read, 0, value.numel))
        return LazyTensor(value.shape, value.dtype, lambda: iter([value.read().reshape(-1)]))
    if type(value) in (dict, OrderedDict):
        return like(value, ((key, lazy(item)) for key, item in value.items()))
    if type(value) in (list, tuple):
        return type(value)(map(lazy, value))
    return value


def like(value: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """A dictionary of the same kind with other items; a module's state keeps the versions that are its attribute."""
    made = type(value)(items)
    if isinstance(value, OrderedDict):
        vars(made).update(vars(value))
    return made


def nbytes_of(tensor: LazyTensor | torch.Tensor) -> int:
    """Bytes that it takes in a file."""
    return torch.Size(tensor.shape).numel() * tensor.dtype.itemsize


def tensors_in(value: Any) -> Iterator[LazyTensor | torch.Tensor]:
    """All tensors of nested values."""
    if isinstance(value, (LazyTensor, torch.Tensor)):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif type(value) in (list, tuple):
        for item in value:
            yield from tensors_in(item)


def common_copy(common: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's values that are not split, of their own: a step count that two states share would be counted
    twice a step."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in common.items()}
