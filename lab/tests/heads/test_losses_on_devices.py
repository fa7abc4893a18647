"""Losses of dense heads on several devices: gradients are those of one device with all examples."""

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn

from torchrope import Features, Swin, ViT
from torchrope_lab.heads import per_device
from torchrope_lab.heads.detr import DINO
from torchrope_lab.heads.segmentation import Mask2Former, UperNet

CLASSES = ("sky", "sea", "sand")
SMALL = dict(queries=20, encoder_layers=1, decoder_layers=2, num_heads=2, mlp_dim=16)
HEADS = ("upernet", "mask2former", "dino")

pytestmark = pytest.mark.slow


def built(head: str) -> nn.Module:
    """Build a model in training mode without random draws or statistics of the batch."""
    torch.manual_seed(0)
    if head == "dino":
        vit = ViT((64, 64), patch_size=16, dim=16, depth=1, num_heads=1, encoding="mixed")
        backbone = Features(vit, pyramid=True, out_channels=8)
        model: Any = DINO(backbone, CLASSES, channels=64, denoising_queries=0, **SMALL)
    else:
        sizes = dict(dim=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1), window_size=4, drop_path=0.0)
        backbone = Features(Swin((64, 64), encoding="mixed", **sizes))
        if head == "upernet":
            model = UperNet(backbone, CLASSES, channels=8, auxiliary_channels=8)
        else:
            model = Mask2Former(backbone, CLASSES, channels=32, points=50, encoder_mlp_dim=16, **SMALL)
    for module in model.train().modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def examples() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return an image with one object and one class, mostly unlabelled, and one with three of both."""
    random = torch.Generator().manual_seed(1)
    images = [torch.randn(3, 64, 64, generator=random) for _ in range(2)]
    boxes = [[[4.0, 4, 20, 24]], [[30.0, 30, 60, 50], [0, 0, 64, 64], [8, 0, 16, 64]]]
    maps = torch.full((64, 64), 255), torch.arange(64).expand(64, -1) * 3 // 64
    maps[0][:10] = 1
    targets = [
        {"boxes": torch.tensor(corners), "labels": torch.arange(len(corners)), "map": map}
        for corners, map in zip(boxes, maps, strict=True)
    ]
    return images, targets


def same_points(*shape: int, **_: Any) -> Tensor:
    """Draw the same points for every mask, as Mask2Former's losses would by chance."""
    points = torch.linspace(0.02, 0.98, shape[1] * shape[2])
    return points.view(1, *shape[1:]).expand(shape).clone()


def gradients(head: str, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    model = built(head)
    with mock.patch("torch.rand", same_points):
        losses = model.losses(images, targets)
    losses.pop("cross_entropy" if head == "mask2former" else "", None)  # of classes, averaged on each device
    torch.stack(list(losses.values())).sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def on_two_devices(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", f"file://{folder}/sync", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    images, targets = examples()
    for head in HEADS:
        averaged = gradients(head, images[rank : rank + 1], targets[rank : rank + 1])
        for gradient in averaged.values():
            distributed.all_reduce(gradient)
            gradient /= 2  # as DDP does
        torch.save(averaged, folder / f"{head}-{rank}.pt")
    if rank == 0:  # in evaluation no device waits for another
        built("upernet").eval().losses(images, targets)
    assert per_device(torch.tensor(0), training=True).item() == 0.5  # a total of 1 at least
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("devices")
    torch.multiprocessing.spawn(on_two_devices, (folder,), nprocs=2)
    return folder


@pytest.mark.parametrize("head", HEADS)
def test_two_devices_with_one_image_equal_one_with_two(by_two: Path, head: str) -> None:
    expected = gradients(head, *examples())
    assert any(gradient.abs().sum() > 0 for gradient in expected.values())
    for rank in (0, 1):
        averaged = torch.load(by_two / f"{head}-{rank}.pt")
        torch.testing.assert_close(averaged, expected, rtol=1e-4, atol=1e-6)


def test_count_of_one_device_is_its_own_and_at_least_one() -> None:
    assert per_device(torch.tensor(7), training=True).item() == 7
    assert per_device(torch.tensor(0), training=True).item() == 1
