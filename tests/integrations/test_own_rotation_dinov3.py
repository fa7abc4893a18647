"""DINOv3 of transformers, which rotates: its outputs after a swap, gradients to frequencies, and the way back."""

import copy
from pathlib import Path

import pytest
import torch
from rotating import dinov3, error, learned

import torchrope as tr


@pytest.mark.parametrize("encoding", ["mixed", "liere:4", "string:8", "comrope-ap:4", "comrope-ld:2"])
def test_dinov3_continues_its_rotation(encoding: str) -> None:
    model, sizes = dinov3(num_register_tokens=2), ((32, 32), (48, 24))
    images = [torch.randn(2, 3, *size) for size in sizes]
    expected = [model(x).last_hidden_state for x in images]
    with pytest.warns(UserWarning, match="outputs change"):
        still = tr.swap(copy.deepcopy(model), encoding, init="zeros")
    assert error(still(images[0]).last_hidden_state, expected[0]) > 0.05
    tr.swap(model, encoding)
    for x, before in zip(images, expected, strict=True):
        assert error(model(x).last_hidden_state, before) < 1e-5
    model(images[0]).last_hidden_state.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in learned(model))
    assert torch.equal(tr.unswap(model)(images[0]).last_hidden_state, expected[0])


def test_dinov3_moves_its_positions_in_training_and_is_saved(tmp_path: Path) -> None:
    model, x = dinov3(pos_embed_rescale=2.0, pos_embed_shift=0.1), torch.randn(1, 3, 32, 32)
    tr.swap(model, "mixed")
    expected = model(x).last_hidden_state
    assert not torch.equal(model.train()(x).last_hidden_state, model(x).last_hidden_state)
    tr.save(model.eval(), tmp_path)
    again = tr.load(tmp_path, into=dinov3(pos_embed_rescale=2.0, pos_embed_shift=0.1))
    assert torch.equal(again(x).last_hidden_state, expected)
    assert again.rotary.lattices == model.rotary.lattices
