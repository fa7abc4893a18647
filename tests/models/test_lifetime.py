"""A layer's rotation lives no longer than the layer needs it."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import torchrope as tr


def built(kind: str, checkpointed: bool) -> tuple[Any, tuple[Tensor, ...]]:
    """Return a model of four layers and its inputs."""
    torch.manual_seed(0)
    shared: Any = dict(encoding="liere:4", checkpoint_layers=checkpointed, in_channels=3, num_outputs=2, dim=16)
    if kind == "ViT":
        return tr.ViT((4, 4), patch_size=1, depth=4, num_heads=2, **shared), (torch.randn(2, 3, 4, 4),)
    if kind == "Swin":
        sizes: Any = dict(patch_size=1, depths=(4,), num_heads=(2,), window_size=2)
        return tr.Swin((4, 4), **sizes, **shared), (torch.randn(2, 3, 4, 4),)
    model = tr.Transformer(num_axes=2, depth=4, num_heads=2, **shared)
    return model, (torch.randn(2, 9, 3), torch.rand(2, 9, 2))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["inference", "checkpointed"])
@pytest.mark.parametrize("kind", ["ViT", "Swin", "Transformer"])
def test_one_rotation_is_alive_at_a_time(kind: str, checkpointed: bool) -> None:
    model, inputs = built(kind, checkpointed)
    tables: list[weakref.ref] = []
    alive: list[int] = []

    def count(module: Any, args: Any, rotation: Any) -> None:
        tables.append(weakref.ref(rotation.table))
        alive.append(sum(table() is not None for table in tables))

    for module in model.modules():
        if isinstance(module, tr.Encoding):
            module.register_forward_hook(count)
    with torch.set_grad_enabled(checkpointed):
        output = model(*inputs)
    assert alive == [1] * 4
    if checkpointed:
        output.sum().backward()
        assert len(tables) == 8  # computed again in the backward pass
