"""The corpus: every target once, whatever the rows, windows and ranks; bad files named with their line."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "launch"))
import itertools

from corpus import (
    NO_TARGET,
    ByteTokenizer,
    Corpus,
    CorpusError,
    FolderTokenizer,
    Rows,
    deal,
    load_documents,
    plain_chat,
    windows,
)

TOKENIZER = ByteTokenizer()


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return str(path)


def followers(rows: Rows) -> list[tuple[int, int, int]]:
    """(document, input, target) of every position that has a target, in stream order."""
    kept = rows.targets != NO_TARGET
    return list(zip(rows.documents[kept], rows.inputs[kept], rows.targets[kept], strict=True))


@pytest.fixture
def three(tmp_path):
    for name, text in (("a.txt", "hello"), ("b.txt", "x"), ("c.py", "import this\n" * 3)):
        write(tmp_path, name, text)
    return Corpus(str(tmp_path), TOKENIZER)


@pytest.mark.parametrize("length", [1, 2, 5, 16, 1000])
@pytest.mark.parametrize("epoch", [0, 1])
def test_every_target_of_every_document_once(three, length, epoch):
    rows = three.rows(seed=3, epoch=epoch, length=length)
    expected = []
    for number, (tokens, _) in enumerate(three.documents):
        expected += [(number, a, b) for a, b in itertools.pairwise(tokens)]
    assert sorted(followers(rows)) == sorted(expected)
    assert rows.counts.sum() == three.targets == len(expected)
    assert rows.inputs.shape[1] == length


def test_positions_restart_and_documents_are_marked(three):
    rows = three.rows(seed=0, epoch=0, length=8)
    for documents, positions in zip(rows.documents, rows.positions, strict=True):
        for place in range(8):
            starts = place == 0 or documents[place] != documents[place - 1]
            assert positions[place] == (0 if starts else positions[place - 1] + 1)


def test_epochs_differ_and_repeat(three):
    first, again, second = (three.rows(1, epoch, 8).inputs for epoch in (0, 0, 1))
    assert np.array_equal(first, again)
    many = Corpus(None, TOKENIZER)
    assert len(many.documents) > 100
    assert not np.array_equal(many.rows(1, 0, 256).inputs[:4], many.rows(1, 1, 256).inputs[:4])
    assert second.shape == first.shape


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 30))
def test_windows_use_every_row_within_the_budget(counts, budget):
    plan = windows(counts, budget)
    assert [row for window in plan for row in window] == list(range(len(counts)))
    for window in plan:
        total = sum(counts[row] for row in window)
        assert total <= budget or len(window) == 1
    for window, following in itertools.pairwise(plan):
        assert sum(counts[row] for row in window) + counts[following.start] > budget


@given(st.integers(0, 30), st.integers(1, 30), st.integers(1, 5), st.integers(1, 5))
def test_a_window_is_dealt_whole_to_any_number_of_ranks(start, size, world, micro_batch):
    window = range(start, start + size)
    shares = [deal(window, rank, world, micro_batch) for rank in range(world)]
    assert sorted(row for share in shares for part in share for row in part) == list(window)
    assert len({len(share) for share in shares}) == 1
    assert all(len(part) <= micro_batch for share in shares for part in share)


def test_prompts_are_no_targets(tmp_path):
    lines = [
        {"text": "abc"},
        {"prompt": "question", "response": "yes"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]},
    ]
    corpus = Corpus(write(tmp_path, "x.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n"), TOKENIZER)
    asked = [TOKENIZER.decode(tokens[1:][is_target[1:]]) for tokens, is_target in corpus.documents]
    assert asked == ["bc", "yes", "ok\n"]
    # The end mark is a target where the last piece is one.
    assert [int(is_target[1:].sum()) for _, is_target in corpus.documents] == [3, 4, 4]


def test_two_rows_of_five_labels_have_eight_targets(tmp_path):
    """transformers#46204: the first label of each document has no predecessor."""
    for name in ("a.txt", "b.txt"):
        write(tmp_path, name, "four")  # four bytes and the end: five labels
    corpus = Corpus(str(tmp_path), TOKENIZER)
    assert corpus.targets == 8
    assert corpus.rows(0, 0, 16).counts.tolist() == [8]


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("x.jsonl", '{"text": "a"}\n{"text": ', "x.jsonl, line 2: not JSON"),
        ("x.jsonl", '{"question": "a"}', "x.jsonl, line 1: expected text"),
        ("x.jsonl", '{"messages": [{"role": "user"}]}', "x.jsonl, line 1: a message is"),
        ("x.jsonl", "3", "x.jsonl, line 1: expected text"),
        ("x.txt", "", "no document has a target"),
        ("x.bin", "abc", None),
    ],
)
def test_bad_files_are_named(tmp_path, name, text, word):
    path = write(tmp_path, name, text)
    if word is None:
        path, word = str(tmp_path), "no file ends in"
    with pytest.raises(CorpusError, match=word):
        Corpus(path, TOKENIZER)
    with pytest.raises(CorpusError, match="no such file"):
        list(load_documents(str(tmp_path / "absent")))


@pytest.mark.parametrize("content", [None, [{"type": "text", "text": "a"}]])
def test_a_message_whose_content_is_no_text_is_refused(tmp_path, content):
    record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]}
    path = write(tmp_path, "x.jsonl", json.dumps(record))
    with pytest.raises(CorpusError, match=r"x.jsonl, line 1: a message is"):
        Corpus(path, TOKENIZER)


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xff"}\n')
    with pytest.raises(CorpusError, match=r"x.jsonl, line 2: not UTF-8"):
        Corpus(str(tmp_path / "x.jsonl"), TOKENIZER)


def folder_tokenizer(folder, template):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    words = {chr(code): code for code in range(128)} | {"</s>": 128}
    plain = Tokenizer(models.BPE(vocab=words, merges=[]))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>")
    made.chat_template = template
    made.save_pretrained(folder)
    return FolderTokenizer(str(folder))


CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "no"},
]
EACH = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }};{% endfor %}"


def test_the_chat_template_of_the_tokenizer_is_used_and_its_answers_are_targets(tmp_path):
    template = EACH + "{% if add_generation_prompt %}[assistant]{% endif %}"
    pieces = folder_tokenizer(tmp_path, template).chat(CHAT)
    assert "".join(text for text, _ in pieces) == "[user]hi;[assistant]ok;[user]so;[assistant]no;"
    assert [text for text, asked in pieces if asked] == ["ok;", "no;"]


def test_a_template_that_rewrites_earlier_messages_is_refused(tmp_path):
    template = "{{ messages | length }}" + EACH
    with pytest.raises(CorpusError, match="rewrites what stands before message 2"):
        folder_tokenizer(tmp_path, template).chat(CHAT)


def test_without_a_template_the_plain_chat_is_used(tmp_path):
    assert folder_tokenizer(tmp_path, None).chat(CHAT) == plain_chat(CHAT)
