"""Text into rows of supervised tokens: every target of every document once an epoch, in an order that no rank changes.

Letters: S row length, R rows of an epoch, n tokens of a document. A document of n tokens has n - 1 targets, fewer where
a prompt is masked. Rows hold (input, target) pairs, so a document that goes on in the next row loses no target there;
it loses the sight of what stood in the row before.
"""

from __future__ import annotations

import hashlib
import json
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

# The label of a position without a target; torch's cross_entropy ignores it by default.
NO_TARGET = -100
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")


class CorpusError(ValueError):
    """A file that does not hold what its name promises; the message names it, and the line."""


class Tokenizer(Protocol):
    """What the corpus asks of a tokenizer."""

    vocabulary: int
    end: int

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The inverse, as far as there is one."""

    def chat(self, messages: list[dict[str, str]]) -> list[tuple[str, bool]]:
        """A conversation as pieces; what the assistant says is a target."""


class ByteTokenizer:
    """UTF-8 bytes and one end mark: no vocabulary to fetch, and every text is known."""

    end = 256
    vocabulary = 257

    def encode(self, text: str) -> list[int]:
        """The bytes."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text up to the end mark."""
        kept = list(tokens)
        kept = kept[: kept.index(self.end)] if self.end in kept else kept
        return bytes(kept).decode("utf-8", errors="replace")

    def chat(self, messages: list[dict[str, str]]) -> list[tuple[str, bool]]:
        """See `plain_chat`."""
        return plain_chat(messages)


class FolderTokenizer:
    """A Hugging Face tokenizer in a local folder."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if self._tokenizer.eos_token_id is None:
            raise CorpusError(f"{folder}: the tokenizer has no end-of-text token, expected one to part documents")
        self.end = self._tokenizer.eos_token_id
        self.vocabulary = len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def chat(self, messages: list[dict[str, str]]) -> list[tuple[str, bool]]:
        """The tokenizer's own chat template, or `plain_chat` where it has none.

        Raises:
            CorpusError: a template that rewrites earlier messages; it cannot be cut into prompt and answer.
        """
        if not self._tokenizer.chat_template:
            return plain_chat(messages)
        pieces: list[tuple[str, bool]] = []
        done = ""
        for number, message in enumerate(messages, 1):
            ends = [self._render(messages[:number])]
            is_answer = message["role"] == "assistant"
            if is_answer and number > 1:  # the header of the answer belongs to the prompt
                ends.insert(0, self._render(messages[: number - 1], add_generation_prompt=True))
            for end in ends:
                if not end.startswith(done):
                    raise CorpusError(f"the chat template rewrites what stands before message {number}")
                pieces.append((end[len(done) :], is_answer and end is ends[-1]))
                done = end
        return pieces

    def _render(self, messages: list[dict[str, str]], **options: bool) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **options)


# (text, whether its tokens are targets), in order.
Pieces = list[tuple[str, bool]]
Chat = Callable[[list[dict[str, str]]], Pieces]


def plain_chat(messages: list[dict[str, str]]) -> Pieces:
    """``<|role|>``, a line end, the content, a line end; for each message."""
    pieces: Pieces = []
    for message in messages:
        pieces.append((f"<|{message['role']}|>\n", False))
        pieces.append((f"{message['content']}\n", message["role"] == "assistant"))
    return pieces


def load_documents(path: str | None, chat: Chat = plain_chat) -> Iterator[Pieces]:
    """The documents of a file or folder, in sorted order; of the Python library that runs this if ``path`` is None.

    .txt and other text: one document a file. .jsonl: one a line, with ``text``, or ``prompt`` and ``response`` (the
    prompt is no target), or ``messages`` of ``role`` and ``content`` (the assistant's are targets).

    Raises:
        CorpusError: nothing to read, or a line that is none of these.
    """
    root = Path(path) if path else Path(sysconfig.get_path("stdlib"))
    if not root.exists():
        raise CorpusError(f"{root}: no such file or folder")
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if _is_text(p, root, standard=path is None))
    if not files:
        raise CorpusError(f"{root}: no file ends in .jsonl or {', '.join(TEXT_SUFFIXES)}")
    for file in files:
        if file.suffix == ".jsonl":
            yield from _read_jsonl(file, chat)
        else:
            text = file.read_text(encoding="utf-8", errors="replace")
            if text:
                yield [(text, True)]


def _is_text(file: Path, root: Path, standard: bool) -> bool:
    if standard:
        parts = file.relative_to(root).parts
        return file.suffix == ".py" and not {"site-packages", "test", "tests", "idlelib"} & set(parts)
    return file.is_file() and file.suffix in (*TEXT_SUFFIXES, ".jsonl")


def _read_jsonl(file: Path, chat: Chat) -> Iterator[Pieces]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise CorpusError(f"{where}: not UTF-8 ({error})") from None
            except json.JSONDecodeError as error:
                raise CorpusError(f"{where}: not JSON ({error})") from None
            yield _pieces(record, where, chat)


def _pieces(record: object, where: str, chat: Chat) -> Pieces:
    if isinstance(record, dict):
        if isinstance(record.get("text"), str):
            return [(record["text"], True)]
        if isinstance(record.get("prompt"), str) and isinstance(record.get("response"), str):
            return [(record["prompt"], False), (record["response"], True)]
        messages = record.get("messages")
        if isinstance(messages, list) and messages:
            for message in messages:
                # Content may also be null (a tool call) or a list of parts; their Python text is nothing to learn.
                if not isinstance(message, dict) or not all(
                    isinstance(message.get(k), str) for k in ("role", "content")
                ):
                    raise CorpusError(f"{where}: a message is {message!r}, expected role and content as text")
            try:
                return chat(messages)
            except CorpusError as error:
                raise CorpusError(f"{where}: {error}") from None
    raise CorpusError(f"{where}: expected text, or prompt and response, or messages; found {str(record)[:80]!r}")


@dataclass(frozen=True)
class Rows:
    """An epoch's packed rows.

    Attributes:
        inputs: [R, S] int32 token ids.
        targets: [R, S] int32, the token that follows; NO_TARGET where none is asked for.
        documents: [R, S] int32, which document a position belongs to; -1 for the padding at the very end.
        positions: [R, S] int32, from 0 at each document's first place in a row.
    """

    inputs: np.ndarray
    targets: np.ndarray
    documents: np.ndarray
    positions: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """[R] int64 targets of each row."""
        return (self.targets != NO_TARGET).sum(1)


class Corpus:
    """Tokenized documents.

    Args:
        path: see `load_documents`.
        tokenizer: of bytes or from a folder.

    Raises:
        CorpusError: also if no document has a target.
    """

    def __init__(self, path: str | None, tokenizer: Tokenizer) -> None:
        self.documents: list[tuple[np.ndarray, np.ndarray]] = []
        for pieces in load_documents(path, tokenizer.chat):
            tokens, asked = [], []
            for text, is_target in pieces:
                piece = tokenizer.encode(text)
                tokens += piece
                asked += [is_target] * len(piece)
            tokens.append(tokenizer.end)
            asked.append(pieces[-1][1])
            self.documents.append((np.array(tokens, dtype=np.int32), np.array(asked, dtype=bool)))
        self.targets = sum(int(asked[1:].sum()) for _, asked in self.documents)
        if not self.targets:
            raise CorpusError(f"{path or 'the Python library'}: no document has a target")

    def digest(self) -> str:
        """sha256 of every document's tokens and targets, in order."""
        found = hashlib.sha256()
        for tokens, asked in self.documents:
            found.update(len(tokens).to_bytes(8, "little") + tokens.tobytes() + asked.tobytes())
        return found.hexdigest()

    def rows(self, seed: int, epoch: int, length: int) -> Rows:
        """The rows of an epoch: a function of data, seed, epoch and length alone."""
        order = list(range(len(self.documents)))
        random.Random(f"{seed} {epoch}").shuffle(order)
        inputs, targets, documents = [], [], []
        for number in order:
            tokens, asked = self.documents[number]
            inputs.append(tokens[:-1])
            targets.append(np.where(asked[1:], tokens[1:], NO_TARGET))
            documents.append(np.full(len(tokens) - 1, number, dtype=np.int32))
        columns = [_fold(inputs, length, 0), _fold(targets, length, NO_TARGET), _fold(documents, length, -1)]
        # A long document fills many rows: a window of neighbours would be a window of one author.
        mixed = np.random.default_rng([seed, epoch]).permutation(len(columns[0]))
        columns = [column[mixed] for column in columns]
        return Rows(*columns, _positions(columns[2]))


def _fold(parts: list[np.ndarray], length: int, padding: int) -> np.ndarray:
    flat = np.concatenate(parts).astype(np.int32)
    return np.pad(flat, (0, -len(flat) % length), constant_values=padding).reshape(-1, length)


def _positions(documents: np.ndarray) -> np.ndarray:
    """[R, S]: places since the document's begin, or the row's where it began earlier."""
    place = np.broadcast_to(np.arange(documents.shape[1], dtype=np.int32), documents.shape)
    first = np.ones_like(documents, dtype=bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return (place - np.maximum.accumulate(np.where(first, place, 0), axis=1)).astype(np.int32)


def windows(counts: Sequence[int], tokens_per_step: int) -> list[range]:
    """Consecutive rows whose targets stay within a budget; at least one row each; the last one as it comes.

    Args:
        counts: [R] targets of each row.
        tokens_per_step: targets a window, over all ranks.
    """
    cuts, total = [0], 0
    for row, count in enumerate(counts):
        if row > cuts[-1] and total + count > tokens_per_step:
            cuts.append(row)
            total = 0
        total += int(count)
    return [range(start, stop) for start, stop in zip(cuts, [*cuts[1:], len(counts)], strict=True) if stop > start]


def deal(window: range, rank: int, world_size: int, micro_batch_size: int) -> list[range]:
    """A rank's micro-batches of a window: as many on every rank, some of them empty.

    Args:
        window: rows.
        micro_batch_size: rows a rank and micro-batch, at most.
    """
    together = world_size * micro_batch_size
    shares = []
    for begin in range(window.start, window.stop, together):
        start = min(begin + rank * micro_batch_size, window.stop)
        shares.append(range(start, min(start + micro_batch_size, window.stop)))
    return shares
