"""Evaluation at other input sizes: inputs, windows, positions; and evaluation of published checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_runs
import timm
import torch
from PIL import Image
from published import Shapes, drawn, linear, norm, randomised, saved
from small_runs import small_run
from torch import nn
from torchvision.transforms import v2

import torchrope as tr
from torchrope_lab.cli import main
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config
from torchrope_lab.training.evaluate import evaluate, keep_range, predict, predict_at, windows_at
from torchrope_lab.training.published_checkpoint import load_checkpoint
from torchrope_lab.training.run import load

Run = Callable[..., tuple[int, str, str]]

CLASSES, SIDE = 2, 32


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/<class>/*.png and val/<class>/*.png of 96 x 128 pixels, with stripes of one pixel."""
    root = tmp_path_factory.mktemp("pictures")
    rows, columns = np.mgrid[:96, :128]
    for part, count in (("train", 4), ("val", 6)):
        for label in range(CLASSES):
            for number in range(count):
                grey = 60 + columns // 2 + 40 * ((rows // (1 + label) + number) % 2)
                (root / part / f"class{label}").mkdir(parents=True, exist_ok=True)
                image = Image.fromarray(np.stack([grey, 255 - grey, grey // 2], -1).astype(np.uint8))
                image.save(root / part / f"class{label}" / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def trained(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained once on the images at 32x32 pixels."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    data = data_config("images", root=str(pictures), size=SIDE, batch_size=4)
    small_runs.trained(small_run(encoding="comrope-ld:4", data=data, patch_size=[8], epochs=1), folder)
    return folder


def deit(folder: Path, classes: int = CLASSES) -> Path:
    """A checkpoint of a ViT in timm's format: 32 pixels, patches of 8, one layer."""
    sizes = dict(img_size=32, patch_size=8, embed_dim=64, depth=1, num_heads=1)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=classes, **sizes)
    return saved({"model": randomised(model).state_dict()}, folder, "deit.pth")


def comrope(folder: Path) -> Path:
    """A checkpoint of ComRoPE-LD without a position table: patches of 8, one layer of two heads, blocks of 4."""
    shapes: Shapes = {"vision_model.embeddings.class_embedding": (32,)}
    shapes |= {"vision_model.embeddings.patch_embedding.weight": (32, 3, 8, 8)}
    shapes |= norm("vision_model.pre_layrnorm", 32) | norm("vision_model.post_layernorm", 32)
    layer = "vision_model.encoder.layers.0"
    shapes |= norm(f"{layer}.layer_norm1", 32) | norm(f"{layer}.layer_norm2", 32)
    shapes |= linear(f"{layer}.mlp.fc1", 64, 32) | linear(f"{layer}.mlp.fc2", 32, 64)
    for part in ("q", "k", "v", "out"):
        shapes |= linear(f"{layer}.self_attn.{part}_proj", 32, 32)
    shapes |= {f"{layer}.self_attn.freqs": (2, 1, 4, 4, 4), f"{layer}.self_attn.multiplier": (1, 2, 4, 1, 1)}
    return saved({"model": drawn(shapes | linear("classification_head", CLASSES, 32))}, folder, "comrope.pth")


# Sizes


@pytest.mark.parametrize(("ratio", "made", "enlarged"), [(0.75, "read", 12), ("native", "cropped", 0)])
def test_evaluation_tells_how_inputs_are_made(trained: Path, run: Run, ratio: Any, made: str, enlarged: int) -> None:
    status, printed, _ = run("evaluate", trained, "--sizes", "32,64,96", "--crop-ratio", str(ratio), "--json")
    assert status == 0
    measures = json.loads(printed)
    assert measures["crop_ratio"] == ratio
    assert json.loads((trained / "evaluation.json").read_text()) == measures
    found = [(at["size"], at["inputs"], at["enlarged"]) for at in measures["resolutions"]]
    assert found == [([32, 32], "trained", 0), ([64, 64], made, 0), ([96, 96], made, enlarged)]
    for at in measures["resolutions"]:
        assert 0 <= at["interval"][0] <= at["top1"] <= at["interval"][1] <= 1


def test_predictions_at_twice_the_size_are_of_files_not_crops(trained: Path, pictures: Path) -> None:
    _, data, module = load(trained)
    labels, logits = predict_at(module.model, data, (64, 64))
    val = data._made_datasets()[1]
    show = v2.Compose([v2.Resize(64), v2.CenterCrop(64), v2.PILToTensor()])
    inputs = torch.stack([val.normalise(show(Image.open(pictures / path))) for path, _ in val.samples])
    with torch.no_grad():
        expected = module.model.eval()(inputs)
        resampled = predict(module.model, data, lambda x: nn.functional.interpolate(x, (64, 64), mode="bilinear"))[1]
    torch.testing.assert_close(logits, expected)
    assert labels.tolist() == [label for _, label in val.samples]
    assert (logits - resampled).abs().max() > 1e-3


def volumes() -> Any:
    """Return a source of volumes of 2 slices of 8 x 16 pixels."""
    return (torch.utils.data.TensorDataset(torch.randn(12, 1, 2, 8, 16), torch.arange(12) % 2),) * 2


def line() -> Any:
    """Return a source of examples with one axis."""
    return (torch.utils.data.TensorDataset(torch.randn(12, 1, 16), torch.arange(12) % 2),) * 2


@pytest.mark.parametrize(
    ("source", "sizes"), [("volumes", [[2, 8, 16], [2, 16, 32]]), ("line", [[16], [32]])], ids=["volumes", "line"]
)
def test_sizes_keep_slices_and_the_ratio_of_sides(
    source: str, sizes: list[list[int]], tmp_path: Path, run: Run
) -> None:
    data = data_config(f"{__name__}:{source}", batch_size=4)
    config = small_run(encoding="axial", data=data, dim=12, num_heads=1, patch_size=[2], epochs=1)
    small_runs.trained(config, tmp_path)
    status, out, error = run("evaluate", tmp_path, "--sizes", "32,16,32", "--json", "--allow", __name__)
    assert status == 0, error
    assert [at["size"] for at in json.loads(out)["resolutions"]] == sizes


def refused(outcome: tuple[int, str, str], message: str) -> None:
    """The command ended with the message in one line."""
    status, _, error = outcome
    assert status == 2
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "30"], "--sizes must be multiples of the patch size, 8 pixels, got 30"),
        (["--sizes", "32,x"], "--sizes[1] must be a whole number, got 'x'"),
        (["--crop-ratio", "0"], "--crop-ratio must be above 0 and at most 1 or native, got 0.0"),
        (["--window-size", "grow"], "--window-size is for a Swin, got grow for a ViT, which has no windows"),
        (["--data", "images"], "--data is for the file of a checkpoint, got"),
        (["--load", "num_heads=1"], "--load is for the file of a checkpoint, got"),
    ],
)
def test_evaluate_command_reports_errors_in_one_line(
    trained: Path, run: Run, arguments: list[str], message: str
) -> None:
    refused(run("evaluate", trained, *arguments), message)


# Windows


def swin() -> tr.Swin:
    torch.manual_seed(0)
    settings = dict(dim=8, depths=(1, 1), num_heads=(1, 2), window_size=4, encoding="bias+mixed")
    return tr.Swin((32, 32), patch_size=2, num_outputs=CLASSES, **settings).eval()


def test_windows_at_scales_with_input_or_takes_a_number() -> None:
    model = swin()
    assert windows_at(model, (64, 64), None) is None
    assert [windows_at(model, (side, side), "grow") for side in (8, 32, 48, 64)] == [[1, 1], [4, 4], [6, 6], [8, 8]]
    assert windows_at(model, (64, 64), 5) == [5, 5]
    clips = tr.Swin((4, 16, 16), patch_size=(1, 4, 4), dim=8, depths=(1,), num_heads=(1,), window_size=(4, 2, 2))
    assert windows_at(clips, (4, 32, 32), "grow") == [4, 4, 4]
    assert windows_at(clips, (4, 32, 32), 3) == [4, 3, 3]
    with pytest.raises(ValueError, match=r"^window_size is for a Swin, got 3 for a ViT, which has no windows$"):
        windows_at(tr.ViT((8, 8), patch_size=2, dim=8, depth=1, num_heads=1), (8, 8), 3)


def test_evaluate_changes_windows_at_other_sizes_only(pictures: Path) -> None:
    model, data = swin(), make_data(data_config("images", root=str(pictures), size=SIDE))
    called: list[tuple[int, object]] = []

    def note(_: nn.Module, inputs: tuple[torch.Tensor], options: dict[str, object]) -> None:
        called.append((inputs[0].shape[-1], options.get("window_size")))

    model.register_forward_pre_hook(note, with_kwargs=True)
    evaluate(model, data, [(64, 64)], "grow")
    assert {*((side, str(window)) for side, window in called)} == {(32, "None"), (64, "[8, 8]")}


# Positions


@pytest.mark.parametrize("encoding", ["comrope-ap:4", "comrope-ld:4", "liere:4", "axial"])
def test_keep_range_changes_positions_at_other_sizes_only(encoding: str) -> None:
    model = tr.ViT((24, 40), patch_size=8, dim=32, depth=1, num_heads=2, encoding=encoding, pool="mean")
    before = model.positions((3, 5))
    keep_range(model)
    assert torch.equal(model.positions((3, 5)), before)
    spacing = before.view(3, 5, 2)[1, 1] - before[0]
    low, high = before[0] - spacing / 2, before[-1] + spacing / 2
    for sizes in ((6, 10), (2, 4), (1, 1)):
        places = model.positions(sizes)
        cells = (high - low) / torch.tensor(sizes)
        torch.testing.assert_close(places[0], low + cells / 2)
        torch.testing.assert_close(places[-1], high - cells / 2)
        if encoding.startswith("comrope"):
            assert 0 <= places.min() <= places.max() < 1
            torch.testing.assert_close(places, (tr.grid(*sizes) + 0.5) / torch.tensor(sizes))


def test_keep_range_needs_a_lattice_with_a_spacing() -> None:
    with pytest.raises(ValueError, match=r"^the model must be a ViT to keep the range of positions, got a Swin"):
        keep_range(swin())
    settings = dict(patch_size=2, dim=8, depth=1, num_heads=1)
    with pytest.raises(ValueError, match=r"^positions must be those of a lattice with a spacing .*per='size'\)$"):
        keep_range(tr.ViT((8, 8), **settings, positions=tr.Lattice(per="size")))
    jittered = tr.Lattice(0.25, 0.125, cell=0.25)
    model = tr.ViT((8, 8), **settings, positions=jittered).eval()
    before = model.positions((4, 4))
    keep_range(model)
    assert torch.equal(model.positions((4, 4)), before)
    assert model.positions((8, 8)).max() < 1


def test_evaluate_command_supports_both_position_rules(trained: Path, run: Run) -> None:
    by = [
        json.loads(run("evaluate", trained, "--sizes", "64", "--positions", rule, "--json")[1])
        for rule in ("spacing", "range")
    ]
    assert [measures.get("positions") for measures in by] == [None, "range"]
    assert by[0]["top1"] == by[1]["top1"]
    assert by[0]["val_loss"] == by[1]["val_loss"]  # bit-identical at the training size


# Checkpoints


@pytest.mark.parametrize("kind", [deit, comrope])
def test_evaluate_command_reads_published_checkpoints(
    tmp_path: Path, pictures: Path, run: Run, kind: Callable[[Path], Path]
) -> None:
    file, out = kind(tmp_path), tmp_path / "measures" / "found.json"
    options = ["--load", "input_size=32"] if kind is comrope else []
    data = ["--data", "images", f"--data.root={pictures}", "--data.batch_size", "4"]
    status, printed, _ = run("evaluate", file, *data, *options, "--sizes=64", "--positions=range", "--out", out)
    assert status == 0
    assert printed.endswith(f"numbers: {out}\n")
    measures = json.loads(out.read_text())
    mean, std = {deit: ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), comrope: ([0.5] * 3, [0.5] * 3)}[kind]
    assert measures["normalise"] == {deit: "imagenet", comrope: "half"}[kind]
    options = {"input_size": 32, "positions": "range"} if kind is comrope else {}
    model = tr.load_published(file, **options)
    for at in measures["resolutions"]:
        side = at["size"][0]
        show = v2.Compose([v2.Resize(side), v2.CenterCrop(side), v2.PILToTensor()])
        files = sorted((pictures / "val").glob("*/*.png"))
        inputs = [v2.functional.normalize(show(Image.open(path)) / 255, mean, std) for path in files]
        with torch.no_grad():
            predicted = model(torch.stack(inputs)).argmax(-1).tolist()
        right = [path.parent.name == f"class{label}" for path, label in zip(files, predicted, strict=True)]
        assert at["top1"] == sum(right) / len(right)
    assert not (tmp_path / "evaluation.json").exists()


def test_comrope_checkpoint_keeps_range_of_positions(tmp_path: Path, pictures: Path) -> None:
    config = data_config("images", root=str(pictures))
    model, data = load_checkpoint(comrope(tmp_path), config, options={"input_size": 32}, ranged=True)
    assert isinstance(model, tr.ViT)
    plain = tr.load_published(tmp_path / "comrope.pth", input_size=32)
    assert torch.equal(model.positions((4, 4)), plain.positions((4, 4)))
    moved = model.positions((8, 8))[1:] + 0.5  # the class token is at the origin, and positions are relative to it
    torch.testing.assert_close(moved, (tr.grid(8, 8) + 0.5) / 8)
    assert 0 <= moved.min() <= moved.max() < 1
    assert data.input_size == (32, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "deit.pth requires --data NAME"),
        (["--data", "digits"], "--data must have the 3 channels of the checkpoint, got 1 of digits"),
        (["--data", "images", "--data.size", "64"], "--data.size must be that of the checkpoint, 32"),
        (["--data", "images", "--load", "layers"], "--load must be NAME=VALUE as in input_size=224, got 'layers'"),
        (["--data", "images", "--load", "layers=1"], "must be among num_heads, input_size, activation, got layers"),
        (["--data", "images", "--crop", "32"], "--crop is for semantic segmentation, got the file of a classifier's"),
        (["--data", "images", "--data.crop_ratoi", "1"], "there is no option --data.crop_ratoi; did you mean"),
        (["--data", "digits", "--crop-ratio", "1"], "--crop-ratio is for images, imagenet, videos, ucf101, got"),
    ],
)
def test_unfitting_checkpoint_raises_one_line(
    tmp_path: Path, pictures: Path, run: Run, arguments: list[str], message: str
) -> None:
    root = [f"--data.root={pictures}"] if "images" in arguments else []
    refused(run("evaluate", deit(tmp_path), *arguments, *root), message)


@pytest.mark.parametrize("classes", [5, 0])
def test_data_must_have_the_classes_of_the_checkpoint(tmp_path: Path, pictures: Path, run: Run, classes: int) -> None:
    outcome = run("evaluate", deit(tmp_path, classes), "--data", "images", "--data.root", pictures)
    refused(outcome, f"--data must have the {classes} classes of the checkpoint, got 2")
