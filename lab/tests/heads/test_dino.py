"""What DINO adds to Deformable DETR: denoising, mixed query selection, look forward twice.

Losses, predictions and training of a detector are in `test_detection.py`.
"""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert
from transformers import DeformableDetrModel

from torchrope.models import ViT, pad
from torchrope.models.features import Features
from torchrope_lab.heads.detr import DINO

CLASSES = ("cat", "dog", "owl")
QUERIES = 20
SIZES: dict[str, int] = dict(channels=64, queries=QUERIES, encoder_layers=1, decoder_layers=3, num_heads=4, mlp_dim=32)
BOXES = [[4.0, 4, 20, 24], [30, 30, 60, 50]]


def built(**settings: Any) -> DINO:
    """Build a detector in float64 with nonzero box heads."""
    torch.manual_seed(0)
    vit = ViT((64, 64), patch_size=16, dim=32, depth=1, num_heads=2, encoding="mixed")
    model = DINO(Features(vit, pyramid=True, out_channels=16), CLASSES, **SIZES, **settings).double()
    for head in model.detr.decoder.bbox_embed:
        nn.init.normal_(head.layers[-1].weight, std=0.5)
    return model


def images(*sizes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, *size, generator=generator, dtype=torch.float64) for size in sizes]


def target(boxes: list[list[float]], labels: list[int]) -> dict[str, Tensor]:
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.int64),
    }


def two() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return one image with two objects, and a smaller one with none."""
    return images((64, 64), (40, 56)), [target(BOXES, [0, 2]), target([], [])]


class DecoderRecord:
    """Records inputs and outputs of the decoder layers of a model."""

    def __init__(self, model: Any) -> None:
        self.given: list[tuple[Any, dict[str, Any]]] = []
        self.states: list[Tensor] = []
        for layer in model.detr.decoder.layers:
            layer.register_forward_pre_hook(lambda _, *each: self.given.append(each), with_kwargs=True)
            layer.register_forward_hook(lambda _, inputs, states: self.states.append(states))

    @property
    def contents(self) -> Tensor:
        return self.given[0][0][0]

    @property
    def boxes(self) -> Tensor:
        """Boxes of the first layer: centres and sizes as shares of the batch."""
        return self.given[0][0][2][:, :, 0]


@torch.no_grad()
def test_denoising_group_does_not_affect_other_queries() -> None:
    model = built(denoising_queries=6).eval()
    given = two()
    before = DecoderRecord(model)
    model.losses(*given)
    noised = before.contents.shape[1] - QUERIES
    assert noised == 12  # 3 groups, in each two objects with less noise and two with more
    for group in range(3):
        rows = slice(4 * group, 4 * group + 4)

        def other_noise(_: nn.Module, inputs: Any, rows: slice = rows) -> Any:
            states, place, boxes, *rest = (each.clone() for each in inputs)
            states[:, rows] += torch.randn_like(states[:, rows])
            boxes[:, rows] = torch.rand_like(boxes[:, rows])
            return (states, place, boxes, *rest)

        changed = DecoderRecord(model)
        handle = model.detr.decoder.layers[0].register_forward_pre_hook(other_noise)
        model.losses(*given)
        handle.remove()
        difference = (changed.states[-1] - before.states[2]).abs().amax(dim=(0, 2))
        assert (difference[rows] > 1e-3).all()
        difference[rows] = 0
        assert difference.max() < 1e-12


@torch.no_grad()
def test_denoising_does_not_affect_matched_queries() -> None:
    model, without = built(denoising_queries=6).train(), built(denoising_queries=0)
    without.load_state_dict(model.state_dict())
    losses = [model.losses(*two()) for _ in range(2)] + [without.losses(*two())]
    for name in ("class", "box", "overlap"):
        torch.testing.assert_close([each[name] for each in losses], [losses[2][name]] * 3)
        torch.testing.assert_close([each[f"first_{name}"] for each in losses], [losses[2][f"first_{name}"]] * 3)
        assert losses[0][f"denoising_{name}"] != losses[1][f"denoising_{name}"]  # noise is drawn again
        assert losses[2][f"denoising_{name}"] == 0
    record = DecoderRecord(model)
    model.losses(*two())
    model.losses(two()[0], [target([], []), target([], [])])
    torch.testing.assert_close(record.states[2][:, -QUERIES:], record.states[5])


@torch.no_grad()
def test_denoising_queries_follow_the_paper() -> None:
    model = built(denoising_queries=6, label_noise=0.0)
    for head in model.detr.decoder.bbox_embed:
        nn.init.zeros_(head.layers[-1].weight)
    record = DecoderRecord(model)
    losses = model.losses(*two())
    noised = box_convert(record.boxes[0, :12], "cxcywh", "xyxy").reshape(3, 2, 2, 4) * 64  # group, noise, object, edge
    boxes = torch.tensor(BOXES, dtype=torch.float64)
    halves = (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2) / 2
    moved = (noised - boxes).abs() / halves
    assert (moved[:, 0] <= 1 + 1e-3).all()
    extents = (noised[..., 2:] - noised[..., :2]).repeat(1, 1, 1, 2)
    # clipped at the image's edge, or opposite edges crossed
    cut = (noised < 1e-2) | (noised > 64 - 1e-2) | (extents < 1e-2)
    assert ((moved[:, 1] >= 1 - 1e-3) | cut[:, 1]).all()
    assert not cut[:, 1].all()
    assert (moved[:, 1] <= 2 + 1e-3).all()
    contents = record.contents[0, :12].reshape(6, 2, -1)
    assert (contents == model.labels.weight[torch.tensor([0, 2])]).all()
    assert (record.contents[1, :12] == 0).all()  # the image without objects
    # Box heads output zero, so that the error of queries with less noise is their noise, in each of three layers.
    shares = box_convert(noised[:, 0] / 64, "xyxy", "cxcywh") - box_convert(boxes / 64, "xyxy", "cxcywh")
    torch.testing.assert_close(losses["denoising_box"], 5 * 3 * shares.abs().sum() / (3 * 2), rtol=1e-3, atol=0)


@torch.no_grad()
def test_many_objects_form_one_denoising_group() -> None:
    model = built(denoising_queries=1)
    record = DecoderRecord(model)
    losses = model.losses(*two())
    assert record.contents.shape[1] == 4 + QUERIES
    assert all(loss.isfinite() for loss in losses.values())


def boxes_of_layers(model: Any, *given: Any) -> list[Tensor]:
    record = []
    matcher = model.criterion.matcher
    handle = matcher.register_forward_pre_hook(lambda _, inputs: record.append(inputs[0]["pred_boxes"]))
    model.losses(*given)
    handle.remove()
    return record[:3]


def test_look_forward_twice_reaches_one_layer_back() -> None:
    model = built()
    heads = [head.layers[-1].weight for head in model.detr.decoder.bbox_embed]
    reached = []
    for boxes in boxes_of_layers(model, *two()):
        gradients = torch.autograd.grad(boxes.sum(), heads, retain_graph=True, allow_unused=True)
        reached.append([each is not None and bool(each.abs().sum() > 0) for each in gradients])
    # Rows are boxes of layers 1 to 3, columns the heads of layers 1 to 3 and of the encoder.
    assert reached == [[True, False, False, False], [True, True, False, False], [False, True, True, False]]


@torch.no_grad()
def test_mixed_query_selection_learns_contents_only() -> None:
    model = built()
    for head in model.detr.decoder.bbox_embed:
        nn.init.zeros_(head.layers[-1].weight)
    model.detr.decoder.class_embed[-1].bias[0] -= 20  # the first class is never predicted
    record, logits = DecoderRecord(model), []
    model.detr.decoder.class_embed[-1].register_forward_hook(lambda _, inputs, output: logits.append(output))
    model.predict(images((64, 64)))
    assert torch.equal(record.contents[0], model.contents.weight)
    cells = [64 // stride for stride in (4, 8, 16, 32, 64)]
    centres = [torch.cartesian_prod(*[(torch.arange(size) + 0.5) / size] * 2).flip(1) for size in cells]
    anchors = [
        torch.cat([each, torch.full_like(each, 0.05 * 2**level)], dim=1) for level, each in enumerate(centres)
    ]  # Zhu et al., appendix A.4
    chosen = logits[0][0, :, 1:].amax(dim=1).topk(QUERIES).indices
    torch.testing.assert_close(record.boxes[0], torch.cat(anchors)[chosen].double(), atol=1e-5, rtol=0)


def test_encoder_loss_is_of_selected_tokens_only() -> None:
    model = built()
    logits = []
    model.detr.decoder.class_embed[-1].register_forward_hook(lambda _, inputs, output: logits.append(output))
    losses = [model.losses(images((64, 64)), [target(BOXES[:1], [label])])["first_class"] for label in (0, 2)]
    assert losses[0] != losses[1]
    (gradient,) = torch.autograd.grad(losses[0], logits[0])
    taught = gradient[0].abs().sum(dim=1) > 0
    best = logits[0][0].amax(dim=1).topk(QUERIES).indices
    assert sorted(taught.nonzero()[:, 0].tolist()) == sorted(best.tolist())


class GivenMaps(nn.Module):
    """Backbone in transformers' form that returns the given maps with masks."""

    def __init__(self, maps: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.maps = maps

    def forward(self, pixels: Tensor, mask: Tensor) -> list[tuple[Tensor, Tensor]]:
        return self.maps


@torch.no_grad()
def test_encoder_inputs_equal_transformers() -> None:
    model, record = built(), []
    model.detr.encoder.register_forward_pre_hook(lambda _, args, given: record.append(given), with_kwargs=True)
    sizes = (64, 64), (40, 56), (70, 130)
    model.losses(images(*sizes), [target([], [])] * 3)
    batch, mask = pad(images(*sizes), 64)
    maps = model.backbone(batch, mask)
    cells = torch.zeros(3, 2, 3)  # a cell of the coarsest map is valid if it begins in the image
    for row, (height, width) in zip(cells, sizes, strict=True):
        row[: math.ceil(height / 64), : math.ceil(width / 64)] = 1
    masks = [nn.functional.interpolate(cells[:, None], each.shape[2:])[:, 0].bool() for each in maps]
    theirs = DeformableDetrModel(model.detr.config).double()
    theirs.backbone = GivenMaps(list(zip(maps, masks, strict=True)))
    theirs.load_state_dict(model.detr.state_dict(), strict=False)
    theirs.encoder.register_forward_pre_hook(lambda _, args, given: record.append(given), with_kwargs=True)
    for heads in ("class_embed", "bbox_embed"):
        setattr(theirs.decoder, heads, getattr(model.detr.decoder, heads))
    theirs(batch, pixel_mask=mask)
    mine, expected = record
    for name, value in mine.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, expected[name]), name
        else:
            assert value == expected[name]
    assert {name for name, value in expected.items() if value is not None} == set(mine)


@torch.no_grad()
def test_decoder_equals_transformers_except_query_positions() -> None:
    model = built()
    places: list[Tensor] = []
    handle = model.place.register_forward_hook(lambda _, inputs, output: places.append(output))
    model.predict(images((64, 64)))
    handle.remove()
    assert len(places) == 3
    assert all((one != other).any() for one, other in pairwise(places))

    model.place.register_forward_hook(lambda _, inputs, output: places[0].expand(len(output), -1, -1))
    record = DecoderRecord(model)
    boxes = boxes_of_layers(model, images((64, 64), (128, 128)), [target([], [])] * 2)
    [states, place, _], given = record.given[0]
    ratios = torch.tensor([0.5, 1], dtype=torch.float64)[:, None, None].expand(2, 5, 2)
    assert given["encoder_attention_mask"].sum(dim=1).tolist() == [341, 4 * 341]  # valid cells
    found = model.detr.decoder(
        inputs_embeds=states,
        object_queries_position_embeddings=place,
        reference_points=record.boxes / ratios[:, :1].repeat(1, 1, 2),
        valid_ratios=ratios,
        **{name: value for name, value in given.items() if name != "attention_mask"},
    )
    torch.testing.assert_close(torch.stack(record.states[:3], dim=1), found.intermediate_hidden_states)
    torch.testing.assert_close(torch.stack(boxes, dim=1), found.intermediate_reference_points)
