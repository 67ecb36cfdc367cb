"""The small decoder: documents of a packed row do not see each other, and checkpointing changes nothing."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "launch"))
from decoder import Decoder, DecoderConfig, FolderModel, ModelError, document_mask, generate

SIZES = {"vocabulary": 50, "width": 32, "layers": 2, "heads": 2}


def model(**changes) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(**{**SIZES, **changes}))


def test_packed_documents_are_as_if_they_stood_alone():
    decoder = model()
    first, second = torch.randint(50, (1, 5)), torch.randint(50, (1, 7))
    packed = decoder(
        torch.cat([first, second], 1),
        torch.cat([torch.arange(5), torch.arange(7)]).unsqueeze(0),
        torch.tensor([[3] * 5 + [9] * 7]),
    )
    alone = [
        decoder(part, torch.arange(part.shape[1]).unsqueeze(0), torch.zeros_like(part)) for part in (first, second)
    ]
    assert torch.allclose(packed, torch.cat(alone, 1), atol=1e-6)


def test_the_mask_is_causal_within_a_document():
    mask = document_mask(torch.tensor([[0, 0, 1]]))[0, 0]
    assert mask.tolist() == [[True, False, False], [True, True, False], [False, False, True]]


def test_checkpointing_changes_no_gradient():
    tokens = torch.randint(50, (2, 6))
    places = torch.arange(6).expand(2, 6)
    gradients = []
    for checkpointing in (False, True):
        decoder = model(checkpointing=checkpointing)
        decoder(tokens, places, torch.zeros_like(tokens)).pow(2).sum().backward()
        gradients.append([parameter.grad for parameter in decoder.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_generation_repeats_with_its_seed_and_stops_at_the_end():
    decoder = model().eval()
    runs = [generate(decoder, [1, 2], end=49, length=20, context=8, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert all(49 not in tokens[:-1] for tokens in runs)


def folder_model(folder, kind, vocabulary=64, **changes):
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=32, num_hidden_layers=2, **changes
    ).save_pretrained(folder)
    torch.manual_seed(0)
    return FolderModel(str(folder), checkpointing=False, vocabulary=vocabulary)


@pytest.mark.parametrize(
    ("kind", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("gemma2", "eager"), ("gpt_neox", "sdpa")]
)
def test_a_model_of_transformers_sees_neither_later_tokens_nor_other_documents(tmp_path, kind, attention):
    """Eager attention adds its mask to the scores: a bool one would hide nothing."""
    model = folder_model(tmp_path, kind, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1).eval()
    model.model.set_attn_implementation(attention)
    tokens, places = torch.randint(1, 60, (1, 12)), torch.arange(6).repeat(1, 2)
    documents = torch.tensor([[0] * 6 + [1] * 6])
    for changed, kept in ((11, slice(0, 11)), (2, slice(6, 12))):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 7) % 60
        with torch.no_grad():
            before, after = model(tokens, places, documents), model(other, places, documents)
        assert torch.allclose(before[:, kept], after[:, kept], atol=1e-5)


def test_a_model_that_cannot_be_masked_is_refused(tmp_path):
    with pytest.raises(ModelError, match="does not take a 4-D attention mask"):
        folder_model(tmp_path, "bloom", n_head=2)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path):
    with pytest.raises(ModelError, match="tokenizer has 257 tokens, the model knows 64"):
        folder_model(
            tmp_path, "llama", vocabulary=257, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1
        )
