"""Features of ViT and Swin: padding masks, strides, the simple feature pyramid, timm's interface."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn
from torch.nn import functional

import torchrope as tr
from torchrope.checkpoints.published import rope_swin
from torchrope.encodings import Choice
from torchrope.models import Features, pad
from torchrope.models.features import FeatureInfo


def vit(side: int = 32, **settings: Any) -> tr.ViT:
    return tr.ViT((side, side), **(dict(patch_size=8, dim=32, depth=4, num_heads=2, num_outputs=5) | settings))


swin = partial(
    tr.Swin, (64, 64), patch_size=2, dim=16, depths=(2, 2, 2), num_heads=(1, 2, 4), window_size=4, encoding="bias"
)


def drawn(features: nn.Module) -> nn.Module:
    """In float64, none of its parameters at a start that hides something."""
    features = features.double().eval()
    with torch.no_grad():
        for parameter in features.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return features


def _images(*sizes: tuple[int, int]) -> list[Tensor]:
    return [torch.randn(3, *size, dtype=torch.float64) for size in sizes]


VITS: dict[str, Callable[[], Features]] = {
    "plain": lambda: Features(vit(encoding="mixed"), indices=(0, 2, -1)),
    "registers": lambda: Features(vit(encoding="liere:8", num_registers=3)),
    "windows": lambda: Features(vit(encoding="liere:8"), window_size=3, global_layers=(2,)),
    "pyramid": lambda: Features(vit(encoding="mixed"), pyramid=True, out_channels=12),
    "windows and pyramid": lambda: Features(
        vit(encoding="axial"), pyramid=True, out_channels=12, window_size=2, global_layers=(2, 4)
    ),
    "a table": lambda: Features(vit(encoding="learned+mixed"), window_size=(4, 2), global_layers=(-1,)),
    "waves": lambda: Features(vit(encoding=Choice(absolute=tr.SinusoidalAPE)), pyramid=True),
    "a bias": lambda: Features(vit(encoding="bias"), window_size=3, global_layers=(1,)),
    "places in the image": lambda: Features(
        vit(encoding="mixed", positions=tr.Lattice(2.0, -1.0, offset=0.5, per="size")), window_size=3
    ),
    "patches of 6": lambda: Features(vit(24, patch_size=6, encoding="mixed"), pyramid=True, out_channels=8),
}
SWINS: dict[str, Callable[[], Features]] = {
    "swin": lambda: Features(swin()),
    "swin with rotations": lambda: Features(swin(encoding="bias+liere:4"), window_size=3),
    "swin with a table": lambda: Features(swin(encoding="learned+mixed"), indices=(0, 2), window_size=(2, 3)),
}


@pytest.mark.parametrize("build", [*VITS.values(), *SWINS.values()], ids=[*VITS, *SWINS])
def test_maps_are_equal_alone_and_padded_in_a_batch(build: Callable[[], Features]) -> None:
    """A bias over the lattice is stretched where that is larger than in training, so there images are small."""
    features = drawn(build())
    small = build is VITS["a bias"]
    images = _images((20, 29), (32, 9), (13, 32)) if small else _images((41, 52), (64, 34), (37, 75))
    batch, mask = pad(images, 4 if small else 5)
    garbage = torch.where(mask.unsqueeze(1), batch, torch.full_like(batch, torch.nan))
    together = features(garbage, mask)
    for index, image in enumerate(images):
        alone = features(image.unsqueeze(0))
        told = features(image.unsqueeze(0), torch.ones(1, *image.shape[1:], dtype=torch.bool))
        for stride, map, own, whole in zip(features.strides, together, alone, told, strict=True):
            height, width = (math.ceil(size / stride) for size in image.shape[1:])
            assert own.shape[2:] == (height, width)
            tolerance = 1e-9 * max(1, own.abs().max())
            assert (map[index, :, :height, :width] - own[0]).abs().max() < tolerance
            assert (whole - own).abs().max() < tolerance
            outside = map[index].clone()
            outside[:, :height, :width] = 0
            assert outside.abs().max() == 0


@pytest.mark.parametrize("build", [*VITS.values(), *SWINS.values()], ids=[*VITS, *SWINS])
def test_maps_have_the_stated_shapes_channels_and_strides(build: Callable[[], Features]) -> None:
    features = build().eval()
    assert all(0 < size <= 64 for size in (features.size_divisor, *features.strides))
    for height, width in ((32, 48), (33, 47), (7, 90)):
        maps = features(torch.randn(2, 3, height, width))
        assert isinstance(maps, list)
        assert [map.shape[1] for map in maps] == list(features.channels)
        sizes = [(math.ceil(height / stride), math.ceil(width / stride)) for stride in features.strides]
        assert [tuple(map.shape[2:]) for map in maps] == sizes


@pytest.mark.parametrize(
    ("patch", "indices", "strides"),
    [
        (16, None, (4, 8, 16, 32)),
        (14, None, (3.5, 7, 14, 28)),
        (4, None, (1, 2, 4, 8)),
        (2, (1, 2, 3), (1, 2, 4)),
        (6, (-1, 0), (12, 1.5)),
        (1, (2, 3), (1, 2)),
    ],
)
def test_pyramid_strides_are_quarter_half_one_and_two_patches(
    patch: int, indices: tuple[int, ...] | None, strides: tuple[float, ...]
) -> None:
    features = Features(vit(4 * patch, patch_size=patch), pyramid=True, indices=indices, out_channels=8)
    assert features.strides == strides
    assert all(isinstance(stride, int) == (stride == int(stride)) for stride in features.strides)
    maps = features(torch.randn(1, 3, 3 * patch + 1, 5 * patch))
    sizes = [(math.ceil((3 * patch + 1) / stride), math.ceil(5 * patch / stride)) for stride in strides]
    assert [tuple(map.shape[2:]) for map in maps] == sizes


def test_pyramid_equals_vitdet() -> None:
    """Against its layers, written down as in detectron2's SimpleFeaturePyramid, on images of whole patches."""
    features = drawn(Features(vit(encoding="mixed"), pyramid=True, out_channels=12))
    image = torch.randn(1, 3, 32, 64, dtype=torch.float64)
    last = features.model.feature_maps(image, [-1], norm=False)[0]

    def normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
        mean, variance = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
        scaled = (x - mean) / (variance + 1e-6).sqrt()
        return scaled * norm.weight[:, None, None] + norm.bias[:, None, None]

    quarter, half, same, double = features.levels
    first, norm, _, second = quarter.enlarge
    up = functional.conv_transpose2d(last, first.weight, first.bias, stride=2)
    up = functional.conv_transpose2d(functional.gelu(normed(up, norm)), second.weight, second.bias, stride=2)
    resized = [
        up,
        functional.conv_transpose2d(last, half.enlarge[0].weight, half.enlarge[0].bias, stride=2),
        last,
        functional.max_pool2d(last, 2, 2),
    ]
    for level, x, map in zip((quarter, half, same, double), resized, features(image), strict=True):
        assert level.project[0].bias is None
        x = normed(functional.conv2d(x, level.project[0].weight), level.project[1])
        x = normed(functional.conv2d(x, level.smooth[0].weight, padding=1), level.smooth[1])
        assert (map - x).abs().max() < 1e-10
    assert [level.project[0].in_channels for level in features.levels] == [8, 16, 32, 32]


def test_maps_of_a_vit_equal_its_layer_outputs() -> None:
    model = drawn(vit(encoding="liere:8", num_registers=1))
    image = torch.randn(1, 3, 40, 24, dtype=torch.float64)
    expected = model.feature_maps(image, [1, 3, 0], norm=False)
    features = Features(model, indices=(1, -2, 0))
    for map, other in zip(features(image), expected, strict=True):
        assert torch.equal(map, other)
    assert len(features.model.layers) == len(features.model.encodings) == 3
    assert not any(name.startswith(("model.head", "model.norm.")) for name, _ in features.named_parameters())
    assert Features(vit()).indices == (1, 2, 3, 4)
    assert Features(vit(depth=12), window_size=2).global_layers == (3, 6, 9, 12)


@pytest.mark.parametrize("size", [(64, 64), (32, 96)])  # windows of 4 fill lattices of 32, 16 and 8
def test_maps_of_a_swin_are_normed_stage_outputs(size: tuple[int, int]) -> None:
    model = drawn(swin(encoding="bias+mixed"))
    image = torch.randn(2, 3, *size, dtype=torch.float64)
    expected = model.feature_maps(image)
    features = Features(copy.deepcopy(model), indices=(0, 2)).double()
    assert features.channels == (16, 64)
    assert features.strides == (2, 8)
    everywhere = torch.ones(2, *size, dtype=torch.bool)
    for mask in (None, everywhere):
        for map, stage in zip(features(image, mask), (expected[0], expected[2]), strict=True):
            normed = functional.layer_norm(stage.movedim(1, -1), stage.shape[1:2]).movedim(-1, 1)
            assert (map - normed).abs().max() < 1e-9


@pytest.mark.parametrize("build", [*VITS.values(), *SWINS.values()], ids=[*VITS, *SWINS])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_reach_every_parameter(build: Callable[[], Features], masked: bool) -> None:
    features = build().train()
    for module in features.modules():
        if hasattr(module, "checkpoint_layers"):
            module.checkpoint_layers = True
    batch, mask = pad([image.float() for image in _images((33, 29), (32, 49))])
    weights = [torch.randn(channels, 1, 1) for channels in features.channels]  # a norm's sum is none
    maps = features(batch, mask if masked else None)
    sum((map * weight).square().sum() for map, weight in zip(maps, weights, strict=True)).backward()
    for name, parameter in features.named_parameters():
        if parameter.numel():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("build", [VITS["windows and pyramid"], VITS["a bias"], SWINS["swin with rotations"]])
def test_checkpointed_layers_give_the_same_gradients(build: Callable[[], Features]) -> None:
    features = drawn(build())
    batch, mask = pad(_images((33, 29), (32, 49)))
    gradients = []
    for again in (False, True):
        features.zero_grad()
        for module in features.modules():
            if hasattr(module, "checkpoint_layers"):
                module.checkpoint_layers = again
        sum(map.square().sum() for map in features(batch, mask)[:2]).backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in features.parameters()])
    for once, twice in zip(*gradients, strict=True):
        assert (once is None) == (twice is None)
        assert once is None or torch.allclose(once, twice, rtol=1e-9, atol=1e-9)


@pytest.mark.slow  # test_vit and test_swin compile what the maps are of
@pytest.mark.parametrize(
    ("build", "masked"), [(VITS["windows and pyramid"], True), (SWINS["swin with rotations"], False)]
)
def test_features_compile_into_one_graph(build: Callable[[], Features], masked: bool) -> None:
    features = build().eval()
    batch, mask = pad([image.float() for image in _images((33, 29), (40, 24))])
    told = mask if masked else None
    compiled = torch.compile(features, fullgraph=True, backend="eager")
    with torch.no_grad():
        for map, expected in zip(compiled(batch, told), features(batch, told), strict=True):
            assert torch.allclose(map, expected, atol=1e-4)


@pytest.mark.parametrize("build", [VITS["windows and pyramid"], VITS["a bias"], SWINS["swin with rotations"]])
def test_features_run_under_autocast(build: Callable[[], Features]) -> None:
    features = build().eval()
    batch, mask = pad([image.float() for image in _images((32, 29), (25, 24))])
    with torch.no_grad():
        exact = features(batch, mask)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = features(batch, mask)
    for map, expected in zip(rounded, exact, strict=True):
        assert map.isfinite().all()
        assert (map - expected).norm() < 0.1 * expected.norm()


class Decoder(nn.Module):
    """A head as it is written for timm's `features_only`: it asks the model for channels and reductions."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        info = backbone.feature_info
        self.lateral = nn.ModuleList(nn.Conv2d(channels, 8, 1) for channels in info.channels())
        self.reductions = info.reduction()
        self.dicts = info.get_dicts(keys=["num_chs", "reduction"])

    def forward(self, x: Tensor) -> Tensor:
        maps = [lateral(map) for lateral, map in zip(self.lateral, self.backbone(x), strict=True)]
        for map, reduction in zip(maps, self.reductions, strict=True):
            assert map.shape[-1] == x.shape[-1] // reduction
        return sum(functional.interpolate(map, x.shape[-2:]) for map in maps)


@pytest.mark.parametrize(
    "backbone",
    [
        lambda: timm.create_model("resnet10t", features_only=True, out_indices=(1, 2, 3)),
        lambda: Features(vit(), pyramid=True, out_channels=16),
        lambda: Features(vit()),
        lambda: Features(swin(), indices=(0, 1, 2)),
    ],
    ids=["timm", "pyramid", "vit", "swin"],
)
def test_head_written_for_timm_works_unchanged(backbone: Callable[[], nn.Module]) -> None:
    head = Decoder(backbone()).eval()
    assert head(torch.randn(1, 3, 64, 96)).shape == (1, 8, 64, 96)
    assert [tuple(each.values()) for each in head.dicts] == list(
        zip(head.backbone.feature_info.channels(), head.reductions, strict=True)
    )


def test_feature_info_equals_timm() -> None:
    theirs = timm.create_model("swin_tiny_patch4_window7_224", features_only=True, depths=(1, 1, 1, 1)).feature_info
    ours = Features(tr.Swin((224, 224), depths=(1, 1, 1, 1))).feature_info
    assert isinstance(ours, FeatureInfo)
    assert len(ours) == len(theirs)
    assert tuple(ours.out_indices) == tuple(theirs.out_indices)
    for idx in (None, 1, [0, 2]):
        assert ours.channels(idx) == theirs.channels(idx)
        assert ours.reduction(idx) == theirs.reduction(idx)
        keys = ["num_chs", "reduction", "index"]
        assert ours.get_dicts(keys, idx) == theirs.get_dicts(keys, idx)
    assert ours.module_name(0) == "maps.0"
    assert ours[1]["num_chs"] == theirs[1]["num_chs"]
    assert ours.get_dicts()[0] == ours[0]


def test_swin_maps_equal_normed_timm_features() -> None:
    settings = dict(depths=(2, 2, 2), num_heads=(1, 2, 4), window_size=4)
    whole = SwinTransformer(img_size=64, embed_dim=16, patch_size=2, **settings)
    ours = swin(num_outputs=1000, encoding="bias")
    ours.load_state_dict(rope_swin.checkpoint(whole.state_dict()).weights(ours))
    features = Features(ours).eval()
    image = torch.randn(1, 3, 64, 64)
    theirs = whole.eval().forward_intermediates(image, intermediates_only=True)
    for map, stage in zip(features(image), theirs, strict=True):
        normed = functional.layer_norm(stage.movedim(1, -1), stage.shape[1:2]).movedim(-1, 1)
        assert (map - normed).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Features(tr.ViT((4, 8, 8), patch_size=4)), r"two axes and square patches, got patches of \(4, 4, 4\)"),
        (lambda: Features(vit(patch_size=(8, 4))), r"two axes and square patches, got patches of \(8, 4\)"),
        (lambda: Features(vit(), indices=(5,)), r"indices must be between -5 and 4, one or more, got \(5,\)"),
        (lambda: Features(vit(), indices=()), r"indices must be between -5 and 4, one or more, got \(\)"),
        (lambda: Features(swin(), indices=(3,)), r"indices must be between -3 and 2, one or more, got \(3,\)"),
        (lambda: Features(vit(), global_layers=(2,)), r"None without a window_size, got \(2,\)"),
        (lambda: Features(vit(), window_size=2, global_layers=(0, 2)), r"counted from 1, got \(0, 2\)"),
        (lambda: Features(vit(), window_size=(2, 2, 2)), r"window_size must be 1 or more, one integer or .*, got"),
        (lambda: Features(swin(), pyramid=True), "must not be set for a Swin, got pyramid=True"),
        (
            lambda: Features(swin(), window_size=4, global_layers=(1,)),
            r"must not be set for a Swin, got global_layers=\(1,\)",
        ),
        (lambda: Features(vit(patch_size=2), pyramid=True), "1 pixel or more, got 0.5 for patches of 2; leave it out"),
        (lambda: Features(vit())(torch.zeros(1, 3, 8, 8), torch.ones(1, 8, 8)), r"boolean \(1, 8, 8\), .*float32"),
        (
            lambda: Features(vit())(torch.zeros(1, 3, 8, 8), torch.ones(1, 4, 8, dtype=torch.bool)),
            r"boolean \(1, 8, 8\), .* got torch.bool \(1, 4, 8\)",
        ),
        (lambda: Features(vit())(torch.zeros(1, 1, 8, 8)), "data must have in_channels = 3, got 1"),
        (lambda: pad([]), r"one or more images \(channels, height, width\) .*, got \[\]"),
        (lambda: pad([torch.zeros(3, 4, 4), torch.zeros(1, 4, 4)]), r"same channels, got \[\(3, 4, 4\), \(1, 4, 4\)\]"),
        (lambda: pad([torch.zeros(4, 4)]), r"got \[\(4, 4\)\]"),
        (lambda: pad([torch.zeros(3, 4, 4)], 0), "divisor must be 1 or more, got 0"),
    ],
)
def test_bad_arguments_raise_one_line_errors(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_pad_keeps_images_and_returns_their_mask() -> None:
    images = _images((5, 9), (8, 3))
    batch, mask = tr.models.pad(images, 4)
    assert batch.shape == (2, 3, 8, 12)
    for image, padded, seen in zip(images, batch, mask, strict=True):
        assert torch.equal(padded[:, seen].flatten(), image.flatten())
        assert padded[:, ~seen].abs().max() == 0
        assert seen[: image.shape[1], : image.shape[2]].all()


def test_empty_batch_with_a_mask() -> None:
    model = tr.ViT((16, 16), patch_size=4, num_outputs=0, dim=16, depth=2, num_heads=2, encoding="learned+mixed")
    found = Features(model)(torch.randn(0, 3, 16, 16), torch.ones(0, 16, 16, dtype=torch.bool))
    assert all(len(each) == 0 for each in found)
