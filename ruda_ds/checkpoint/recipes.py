"""How one named tensor is made of others: runs of elements copied, transposed, interleaved, or with LoRA added.

A conversion is a list of recipes, known before a byte is read: sizes, shapes and whether each element of the source
is used once are all checked first. One part of a recipe is in memory at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from ruda_ds.shapes import element_count

CHUNK = 1 << 18  # elements that are copied at once: small enough for a cache and for memory that is used again


class Source(Protocol):
    """Named tensors that can be read in part."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """Dtype that a tensor has in the model; ``read`` may give a more precise one (float32 masters)."""

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """``count`` flattened elements from ``start``, 1-D."""


@dataclass(frozen=True)
class Slice:
    """Elements of a flattened tensor: ``count`` of them from ``start``, every ``step``-th."""

    name: str
    start: int
    count: int
    step: int = 1

    def read(self, source: Source) -> torch.Tensor:
        """The elements, 1-D."""
        if self.step == 1:
            return source.read(self.name, self.start, self.count)
        lane = self.start % self.step
        return source.read(self.name, self.start - lane, self.count * self.step)[lane :: self.step]


class Make(Enum):
    """What a part does with its slices.

    COPY: one slice as it is. TRANSPOSE: one slice as a matrix ``view``, transposed. INTERLEAVE: the elements of two
    slices in turn; with a ``view`` both are matrices [F, H] and the result is [H, 2 F], columns in turn. ADD_LORA:
    slices W, A [Q, in] and B [out, Q] -> W + scale * B A, with ``view`` (out, in, Q).
    """

    COPY = "copy"
    TRANSPOSE = "transpose"
    INTERLEAVE = "interleave"
    ADD_LORA = "add_lora"


@dataclass(frozen=True)
class Part:
    """A run of a recipe's elements."""

    slices: tuple[Slice, ...]
    make: Make = Make.COPY
    view: tuple[int, ...] = ()
    scale: float = 1.0

    @property
    def numel(self) -> int:
        """Elements that it gives."""
        if self.make is Make.ADD_LORA:
            return self.slices[0].count
        return sum(piece.count for piece in self.slices)

    def chunks(self, source: Source) -> Iterator[torch.Tensor]:
        """Its elements in order, 1-D, in the source's dtype (wider for ADD_LORA)."""
        if self.make is Make.COPY:
            (piece,) = self.slices
            for begin in range(0, piece.count, CHUNK):
                count = min(CHUNK, piece.count - begin)
                yield Slice(piece.name, piece.start + begin * piece.step, count, piece.step).read(source)
            return
        read = [piece.read(source) for piece in self.slices]
        if self.make is Make.TRANSPOSE:
            yield read[0].view(self.view).t().reshape(-1)
        elif self.make is Make.INTERLEAVE:
            pair = [part.view(self.view).t() for part in read] if self.view else read
            yield torch.stack(pair, dim=-1).reshape(-1)
        else:
            out, inner, rank = self.view
            wide = torch.promote_types(torch.promote_types(read[0].dtype, read[1].dtype), torch.float32)
            weight, a, b = (part.to(wide) for part in read)
            yield (weight.view(out, inner) + (b.view(out, rank) @ a.view(rank, inner)) * self.scale).reshape(-1)


@dataclass(frozen=True)
class Recipe:
    """A tensor and how it is made.

    Attributes:
        name, shape: of the result.
        parts: its flattened elements, in order.
        rows: for cubes of experts, how many parts make one expert; 0 for others.
        keep_dtype: it stays in the dtype of its source whatever dtype is asked for (selection biases).
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    rows: int = 0
    keep_dtype: bool = False

    @property
    def numel(self) -> int:
        """Elements of the result."""
        return element_count(self.shape)

    def experts(self, start: int, stop: int) -> Recipe:
        """The same for a range of experts."""
        parts = self.parts[start * self.rows : stop * self.rows]
        return Recipe(self.name, (stop - start, *self.shape[1:]), parts, self.rows, self.keep_dtype)

    @property
    def first(self) -> str:
        """Name of the tensor that its first elements come from."""
        return self.parts[0].slices[0].name

    def chunks(self, source: Source, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Its flattened elements in order and in ``dtype``."""
        for part in self.parts:
            for chunk in part.chunks(source):
                yield chunk.to(dtype).contiguous()


def copy_of(name: str, shape: tuple[int, ...], source_name: str, keep_dtype: bool = False) -> Recipe:
    """A tensor that is the same under another name."""
    return Recipe(name, shape, (Part((Slice(source_name, 0, element_count(shape)),)),), keep_dtype=keep_dtype)


def unaccounted(recipes: Iterable[Recipe], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What is wrong with the use of a source: tensors that are not used, or not used exactly once, and recipes of the
    wrong length. Empty if every element goes to one place."""
    used: dict[str, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    problems = []
    for recipe in recipes:
        if sum(part.numel for part in recipe.parts) != recipe.numel:
            problems.append(f"{recipe.name}: {sum(part.numel for part in recipe.parts)} elements for {recipe.shape}")
        for part in recipe.parts:
            for piece in part.slices:
                lane = piece.start % piece.step if piece.step > 1 else -1
                begin = piece.start - max(lane, 0)
                used[piece.name][lane].append((begin, begin + piece.count * piece.step))
    for name, shape in shapes.items():
        lanes = used.pop(name, {})
        if not lanes and element_count(shape):
            problems.append(f"{name}: not used")
            continue
        if lanes and set(lanes) not in ({-1}, {0, 1}):
            problems.append(f"{name}: used in part")
            continue
        for runs in lanes.values():
            place = 0
            for begin, end in sorted(runs):
                if begin != place:
                    problems.append(f"{name}: elements {min(begin, place)}..{max(begin, place)} not used once")
                    break
                place = end
            else:
                if place != element_count(shape):
                    problems.append(f"{name}: {place} of {element_count(shape)} elements used")
    problems.extend(f"{name}: not in the source" for name in used)
    return problems
