"""The small decoder: documents of a packed row do not see each other, and checkpointing changes nothing."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "launch"))
from decoder import Decoder, DecoderConfig, document_mask, generate

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
