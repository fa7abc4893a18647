"""Recipes of papers: models and optimisers against the published numbers, and two training steps of each."""

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from miniatures import MINIATURES
from PIL import Image
from processes import data_of
from small_runs import changed, trained
from torch import nn
from torchvision import transforms
from torchvision.transforms import v2
from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

from torchrope.checkpoints.convert import load_backbone
from torchrope.encodings import AbsoluteEncoding, LearnedAPE
from torchrope.models import ViT
from torchrope.models.layers import DropPath
from torchrope_lab import cli, recipes
from torchrope_lab.cli import main
from torchrope_lab.data.clips import test_frames
from torchrope_lab.data.data_config import DataConfig, data_config
from torchrope_lab.data.sets import NAMES_DENSE
from torchrope_lab.data.videos import read_clips
from torchrope_lab.engine.published import cite, results_of
from torchrope_lab.settings.run_config import RunConfig, read_config
from torchrope_lab.training.dense_models import build_features, build_head
from torchrope_lab.training.devices import accumulation_steps
from torchrope_lab.training.evaluate import data_at_size
from torchrope_lab.training.models import build_model
from torchrope_lab.training.optim import build_optimizer, build_schedule, parameter_groups
from torchrope_lab.training.run import build_module, train

PAPERS = [name for name in recipes.names() if recipes.find(name).source]
pytestmark = pytest.mark.usefixtures("published_miniatures")

QUICK = ("liere-cifar100-vit-t", "liere-imagenet", "rope-swin-t")  # train within a second
CLASSES = {"cifar100": 100, "imagenet": 1000, "ucf101": 101, "rsna": 2, "ade20k": 150, "coco": 80}


def configuration(name: str) -> RunConfig:
    return read_config({"seed": 0, **recipes.settings(name)})


def shape(config: DataConfig) -> SimpleNamespace:
    """Return the attributes of the full data set that a model is built from."""
    side = config.size
    frames = getattr(config, "frames", None)
    sizes = (frames, side, side) if frames else (side, side)
    axes = ("depth" if config.name == "rsna" else "time", "height", "width")[-len(sizes) :]
    classes = tuple(map(str, range(CLASSES[config.name])))
    return SimpleNamespace(
        input_size=sizes,
        in_channels=3,
        num_classes=len(classes),
        classes=classes,
        map_classes=classes,
        axes=axes,
        tasks=("segment", "detect") if config.name in NAMES_DENSE else ("classify",),
        lattice=True,
    )


def built(name: str, encoding: str | None = None) -> nn.Module:
    config = configuration(name)
    data, encoding = shape(config.data), encoding or config.encoding
    with torch.device("meta"):
        if config.model.task == "classify":
            return build_model(encoding, config.model, data)
        return build_head(config.model, build_features(encoding, config.model, data), data)


def small_vit() -> ViT:
    return ViT((2,), patch_size=1, in_channels=1, num_outputs=2, dim=2, depth=1, num_heads=1)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
def test_recipe_builds_with_each_of_its_encodings(name: str) -> None:
    for encoding in [configuration(name).encoding, *recipes.settings(name).get("encodings", [])]:
        assert count(built(name, encoding)) > 1e7


@pytest.mark.parametrize("name", PAPERS)
def test_recipe_states_source_results_hardware_command(name: str) -> None:
    recipe = recipes.find(name)
    assert len(recipe.summary) <= 114
    assert re.search(r"et al\., .*(ICLR 2025|CVPR 2025|arXiv:[\d.]+)", cite(recipe.source))
    assert re.search("GPU|L4|A100", recipe.hardware)
    assert recipe.notes
    assert any(command.startswith(f"train --recipe {name} --data.root DIR") for command in recipe.commands)
    on_each = re.findall(r"(\d+) (?:examples?|clips) (?:each|per step)", recipe.hardware)
    assert set(on_each) <= {str(configuration(name).data.batch_size)}
    named = re.findall(r"--(?:recipe|data\.name) (\S+)", " ".join(recipe.commands))
    assert set(named) <= set(recipes.names())
    assert (configuration(name).init is None) == ("--init" not in " ".join(recipe.commands))


@pytest.mark.parametrize("name", [name for name in PAPERS if name != "comrope-imagenet"])  # of the main paper
def test_published_results_of_a_recipe_are_in_the_tables(name: str) -> None:
    results = results_of(recipes.find(name))
    assert results
    assert all(value > 1 for values in results.values() for value in values.values())


def test_baselines_beside_published_results_are_the_recipes_encodings() -> None:
    results = results_of(recipes.find("liere-cifar100-vit-b"))["top-1"]
    assert results == {"learned": 63.9, "visionllama": 65.5, "liere:2": 68.8, "liere:8": 70.3, "liere": 70.0}
    for name in ("liere-cifar100-vit-t", "liere-imagenet", "liere-ucf101", "liere-ucf101-v1", "liere-rsna"):
        published = results_of(recipes.find(name))["top-1"]
        assert set(published) - {"visionllama"} <= set(recipes.settings(name)["encodings"])
    assert "comrope-rope, perturbed" in results_of(recipes.find("comrope-ucf101"))["top-1"]


@pytest.mark.parametrize(
    ("name", "encoding", "millions"),
    [
        ("liere-cifar100-vit-b", "none", 85.1),
        ("liere-cifar100-vit-l", "none", 302),
        ("liere-ucf101", "none", 86.3),
        ("liere-ucf101", "learned", 86.9),
        ("liere-ucf101-v1", "learned", 88.7),  # LieRE, arXiv:2406.10322v1, table 2
    ],
)
def test_parameters_equal_published_numbers(name: str, encoding: str, millions: float) -> None:
    digits = 0 if isinstance(millions, int) else 1
    assert round(count(built(name, encoding)) / 1e6, digits) == millions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "encoding", "theirs"),
    [
        ("rope-vit-s", "learned", "deit3_small_patch16_224"),
        ("rope-vit-b", "learned", "deit3_base_patch16_224"),
        ("rope-vit-l", "learned", "deit3_large_patch16_224"),
        ("rope-swin-t", "bias", "swin_tiny_patch4_window7_224"),
        ("rope-swin-s", "bias", "swin_small_patch4_window7_224"),
        ("rope-swin-b", "bias", "swin_base_patch4_window7_224"),
    ],
)
def test_parameters_equal_timm(name: str, encoding: str, theirs: str) -> None:
    with torch.device("meta"):
        assert count(built(name, encoding)) == count(timm.create_model(theirs, img_size=configuration(name).data.size))


@pytest.mark.parametrize("size", ["s", "b"])
def test_mask2former_parameters_equal_transformers(size: str) -> None:
    dim, heads = (96, 3) if size == "s" else (128, 4)
    stages = dict(depths=[2, 2, 18, 2], num_heads=[heads * 2**stage for stage in range(4)])
    swin = SwinConfig(embed_dim=dim, **stages, out_indices=[1, 2, 3, 4])
    with torch.device("meta"):
        theirs = Mask2FormerForUniversalSegmentation(
            Mask2FormerConfig(backbone_config=swin, id2label=dict(enumerate(map(str, range(150)))))
        )
    last_norm = 2 * 8 * dim  # which none of transformers' maps goes through
    assert count(built(f"rope-vit-ade20k-mask2former-swin-{size}", "bias")) == count(theirs) - last_norm


@pytest.mark.parametrize(
    ("name", "encoding", "extra"),
    [
        ("liere-cifar100-vit-b", "liere:8", 64_512),
        ("liere-cifar100-vit-t", "liere:8", 12 * 6 * 2 * 8 * 28),
        ("liere-imagenet", "liere:8", 64_512),
        ("liere-rsna", None, 3 * 2016),  # the first version shares the generators of whole heads
        ("liere-ucf101-v1", None, 3 * 2016),
    ],
)
def test_parameters_include_generators(name: str, encoding: str | None, extra: int) -> None:
    assert count(built(name, encoding)) - count(built(name, "none")) == extra


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("liere-cifar100-vit-b", 8 * 8),
        ("liere-imagenet", 14 * 14),
        ("liere-second-stage", 16 * 16),
        ("liere-ucf101", 4 * 14 * 14),
        ("liere-rsna", 8 * 14 * 14),
        ("liere-ucf101-v1", 8 * 14 * 14),
        ("comrope-imagenet", 14 * 14),
        ("comrope-ucf101", 8 * 14 * 14),
        ("rope-vit-b", 12 * 12),
        ("rope-vit-b-224", 14 * 14),
        ("rope-swin-t", 56 * 56),
    ],
)
def test_inputs_have_the_papers_number_of_tokens(name: str, tokens: int) -> None:
    assert math.prod(built(name).embed.lattice(shape(configuration(name).data).input_size)) == tokens


@pytest.mark.parametrize(
    ("name", "batch", "devices"),
    [
        *((f"liere-cifar100-vit-{size}", 512, 8) for size in "tbl"),
        ("liere-imagenet", 512, 8),
        ("liere-second-stage", 512, 8),
        ("liere-ucf101", 64, 8),
        ("liere-rsna", 64, 8),
        ("liere-ucf101-v1", 64, 8),
        ("comrope-imagenet", 6144, 64),
        ("comrope-ucf101", 768, 64),
        ("comrope-finetune", 3456, 64),
        ("rope-vit-s", 2048, 8),
        ("rope-vit-b", 2048, 8),
        ("rope-vit-l", 2048, 64),
        ("rope-vit-b-224", 512, 8),
        ("rope-vit-l-224", 512, 64),
        *((f"rope-swin-{size}", 1024, 8) for size in "tsb"),
        *((f"rope-vit-ade20k-upernet-vit-{size}", 16, 8) for size in "bl"),
        *((f"rope-vit-ade20k-mask2former-swin-{size}", 16, 8) for size in "sb"),
        *((f"rope-vit-coco-dino-{name}", 16, 8) for name in ("vit-b", "vit-l", "swin-t", "swin-s", "swin-b")),
    ],
)
def test_effective_batch_is_the_papers_on_its_devices(name: str, batch: int, devices: int) -> None:
    config = configuration(name)
    assert config.data.batch_size * devices * accumulation_steps(config, devices) == batch
    assert accumulation_steps(config, devices) == 1
    assert config.data.batch_size * accumulation_steps(config, 1) == batch


@pytest.mark.parametrize("name", PAPERS)
def test_effective_batch_divides_on_1_to_64_devices(name: str) -> None:
    config = configuration(name)
    effective = config.optim.effective_batch
    for devices in (1, 2, 4, 8, 16, 32, min(64, effective)):
        used = min(devices, effective)
        batch = min(config.data.batch_size, effective // used)  # more devices than the paper's take less each
        assert batch * used * accumulation_steps(changed(config, batch_size=batch), used) == effective, devices


@pytest.mark.parametrize(
    ("name", "rate", "warm", "last", "falls"),
    [
        *((f"liere-cifar100-vit-{size}", 1e-4, 0.0, 0.0, []) for size in "tbl"),
        *((f"liere-{name}", 1e-4, 0.0, 0.0, []) for name in ("imagenet", "ucf101", "ucf101-v1", "rsna")),
        ("liere-second-stage", 1e-5, 0.0, 0.0, []),
        ("comrope-imagenet", 1e-3, 0.02, 0.0, []),
        ("comrope-ucf101", 1.2e-4, 0.02, 0.0, []),
        ("comrope-finetune", 3e-4, 0.02, 0.0, []),
        ("rope-vit-s", 4e-3, 5 / 400, 1e-5, []),
        ("rope-vit-b", 3e-3, 5 / 400, 1e-5, []),
        ("rope-vit-l", 3e-3, 5 / 400, 1e-5, []),
        ("rope-vit-b-224", 1e-5, 5 / 20, 1e-5, []),
        ("rope-vit-l-224", 1e-5, 5 / 20, 1e-5, []),
        *((f"rope-swin-{size}", 1e-3, 20 / 300, 1e-5, []) for size in "tsb"),
        ("rope-vit-ade20k-upernet-vit-b", 5e-5, 1500 / 160_528, 0.0, []),
        ("rope-vit-ade20k-upernet-vit-l", 4e-5, 1500 / 160_528, 0.0, []),
        *((f"rope-vit-ade20k-mask2former-swin-{size}", 1e-4, 0.0, 0.0, []) for size in "sb"),
        ("rope-vit-coco-dino-vit-b", 1e-4, 0.0, 1e-5, [11 / 12]),
        ("rope-vit-coco-dino-vit-l", 1e-4, 250 / 90_000, 1e-5, [300 / 375]),
        *((f"rope-vit-coco-dino-swin-{size}", 1e-4, 0.0, 1e-5, [11 / 12]) for size in "tsb"),
    ],
)
def test_schedule_is_the_papers(name: str, rate: float, warm: float, last: float, falls: list[float]) -> None:
    config = configuration(name).optim
    steps = 100_000
    optimizer = build_optimizer(small_vit(), config)
    schedule = build_schedule(optimizer, config, steps)

    def at(share: float) -> float:
        return optimizer.defaults["lr"] * schedule.lr_lambdas[0](round(share * steps))

    assert at(0) == pytest.approx(rate / max(1, warm * steps), rel=0.02)
    assert at(warm / 2) == pytest.approx(rate / (2 if warm else 1), rel=0.02)
    assert at(warm) == pytest.approx(rate)
    assert at(1) == pytest.approx(last, abs=1e-12)
    half = 0.5**0.9 if config.schedule == "polynomial" else 0.5
    if not falls:
        assert at((warm + 1) / 2) == pytest.approx(last + half * (rate - last), rel=1e-2)
    for share in falls:
        assert (at(share - 0.0005), at(share + 0.0005)) == pytest.approx((rate, rate / 10))


def test_optimiser_equals_the_papers() -> None:
    settings = {name: configuration(name).optim for name in PAPERS}
    kinds = {
        name: (kind.optimizer, kind.weight_decay, kind.clip, kind.loss, kind.epochs) for name, kind in settings.items()
    }
    plain = ("adam", 0, 0, "cross-entropy")
    assert {kinds[name] for name in PAPERS if name.startswith("liere")} == {(*plain, 200), (*plain, 30)}
    assert kinds["liere-second-stage"] == (*plain, 30)
    assert {kinds[f"rope-vit-{size}"] for size in "sbl"} == {("lamb", 0.03, 1.0, "bce", 400)}
    assert {kinds[f"rope-vit-{size}-224"] for size in "bl"} == {("adamw", 0.1, 0, "cross-entropy", 20)}
    assert {kinds[f"rope-swin-{size}"] for size in "tsb"} == {("adamw", 0.05, 5.0, "cross-entropy", 300)}
    dino = {kinds[name] for name in PAPERS if "dino" in name}
    assert dino == {("adamw", 1e-4, 0.1, "cross-entropy", 12)}
    assert {settings[name].backbone_lr for name in PAPERS if "dino" in name} == {0.1}
    for name, epochs in {"comrope-imagenet": 200, "comrope-ucf101": 80, "comrope-finetune": 4}.items():
        assert kinds[name] == ("adamw", 0.01, 1.0, "cross-entropy", epochs)


def drop_rates(name: str) -> list[float]:
    model = built(name)
    backbone = model.backbone.model if hasattr(model, "backbone") else model
    return [part.p for part in backbone.modules() if isinstance(part, DropPath)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rate", "constant"),
    [
        ("rope-vit-b", 0.1, True),  # deit/README.md of naver-ai/rope-vit, dpr_constant of its models_v2.py
        ("rope-vit-b-224", 0.2, True),
        ("rope-vit-l", 0.4, True),
        ("rope-vit-l-224", 0.45, True),
        ("rope-swin-t", 0.2, False),
        ("rope-vit-ade20k-upernet-vit-l", 0.2, False),
        ("rope-vit-coco-dino-vit-b", 0.1, False),
    ],
)
def test_stochastic_depth_schedule_equals_the_papers(name: str, rate: float, constant: bool) -> None:
    rates = drop_rates(name)
    expected = [rate] * len(rates) if constant else torch.linspace(0, rate, len(rates)).tolist()
    assert rates == pytest.approx(expected)


IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LIERE = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
BICUBIC = v2.InterpolationMode.BICUBIC
HALF = (0.5,) * 3, (0.5,) * 3
TRANSFORMS = {  # of training and validation, in LieRE's lightning_data_image.py, DeiT, Swin and ComRoPE's model.py
    "liere": (lambda size: transforms.RandomResizedCrop(size), lambda size: (v2.CenterCrop(size), v2.Resize(size))),
    "rope-vit": (lambda size: RandomBicubic(size), lambda size: (v2.Resize(size, BICUBIC), v2.CenterCrop(size))),
    "rope-swin": (
        lambda size: RandomBicubic(size),
        lambda size: (v2.Resize(256 * size // 224, BICUBIC), v2.CenterCrop(size)),
    ),
    "comrope": (
        lambda size: transforms.Compose([transforms.Resize(round(1.1 * size)), transforms.RandomCrop((size, size))]),
        lambda size: (v2.Resize(round(1.1 * size)), v2.CenterCrop(size)),  # the same scale; theirs is not published
    ),
}
RandomBicubic = partial(transforms.RandomResizedCrop, interpolation=BICUBIC)
STATISTICS = {"liere": LIERE, "comrope": HALF}


@pytest.mark.parametrize("size", [224, 448])
@pytest.mark.parametrize("name", [name for name in PAPERS if configuration(name).data.name == "imagenet"])
def test_images_are_those_of_the_authors_code(name: str, size: int, tmp_path: Path) -> None:
    picture = Image.effect_noise((400, 300), 99).convert("RGB")
    for place in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / place).mkdir(parents=True)
        picture.save(tmp_path / place / "0.png")
    data = data_of(changed(configuration(name), root=str(tmp_path), workers=0))
    code = next(code for code in TRANSFORMS if name.startswith(code))
    random, centre = (transform(size) for transform in TRANSFORMS[code])
    normalise = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(*STATISTICS.get(code, IMAGENET))]
    theirs = v2.Compose([*centre, v2.ToImage(), *normalise])
    train, val = data_at_size(data, (size, size))._made_datasets()
    torch.testing.assert_close(val[0][0], theirs(picture).data)
    if size == data.input_size[0]:
        crops = []
        for crop in (train.view.transform, random):
            torch.manual_seed(3)
            crops.append(np.asarray(crop(picture)))
        np.testing.assert_array_equal(*crops)


@pytest.mark.parametrize(
    ("name", "ratio", "statistics"),
    [("comrope-ucf101", 1.1, HALF), ("liere-ucf101", 1, IMAGENET), ("liere-ucf101-v1", 1, IMAGENET)],
)
def test_clips_are_those_of_the_authors_code(
    name: str, ratio: float, statistics: Any, miniature_roots: dict[str, Path]
) -> None:
    config = changed(miniature(name, miniature_roots), size=24)
    data = data_of(config)
    val = data._made_datasets()[1]
    (clip,) = read_clips(val.root / val.samples[0][0], lambda count: test_frames(count, 4, config.data.frame_stride, 1))
    theirs = v2.Compose([v2.Resize(round(ratio * 24)), v2.CenterCrop(24), v2.ToDtype(torch.float32, scale=True)])
    torch.testing.assert_close(val[0][0].movedim(1, 0), v2.functional.normalize(theirs(clip), *statistics))
    assert name == "comrope-ucf101" or config.data.augment.randaugment == "timm:rand-m7-n4-mstd0.5-inc1"


@pytest.mark.parametrize(
    ("name", "redrawn"),
    [
        ("rope-vit-ade20k-upernet-vit-b", True),  # cat_max_ratio=0.75 of mmsegmentation
        ("rope-vit-ade20k-mask2former-swin-s", False),  # SINGLE_CATEGORY_MAX_AREA: 1.0 of Mask2Former
        ("rope-vit-ade20k-mask2former-swin-b", False),
    ],
)
def test_crops_of_one_class_are_drawn_again_as_in_the_heads_code(name: str, redrawn: bool, tmp_path: Path) -> None:
    config = configuration(name)
    root = MINIATURES["ade20k"](tmp_path)
    for mask in root.glob("**/annotations/training/*.png"):
        indices = np.full_like(np.asarray(Image.open(mask)), 1)
        indices[:, : indices.shape[1] // 3] = 2
        Image.fromarray(indices).save(mask)
    augment = {"scale_jitter": (2.0, 2.0), "max_class_share": config.data.augment.max_class_share}
    config = changed(config, root=str(root), size=24, workers=0, augment=augment)
    train = data_of(config)._made_datasets()[0]
    shares = [(target["map"] == 1).float().mean() for seed in range(20) for _, target in train.of_epoch(seed)]
    dominated = sum(not 0.25 < share < 0.75 for share in shares) / len(shares)
    assert dominated < 0.2 if redrawn else dominated > 0.5


def test_liere_recipes_have_the_papers_baselines() -> None:
    for name in PAPERS:
        if name.startswith("liere") and name != "liere-second-stage":
            assert "liere:2" in recipes.settings(name)["encodings"]  # "RoPE-Mixed" of the tables
    turned = built("liere-ucf101", "visionllama").encodings[0]
    assert (turned.rotary_dim, turned.head_dim) == (60, 64)
    assert built("liere-ucf101", "liere:8").encodings[0].rotary_dim == 64


@pytest.mark.parametrize("name", ["liere-cifar100-vit-b", "liere-imagenet"])
def test_first_version_in_two_dimensions_is_a_note_with_its_options(name: str, capsys: Any) -> None:
    (options,) = re.findall(r"first version.*?: (--encoding.*?)\.$", "\n".join(recipes.find(name).notes), re.MULTILINE)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["train", "--recipe", name, *options.split(), "--print_config"])
    config = read_config(yaml.safe_load(capsys.readouterr().out))
    with torch.device("meta"):
        sizes = [count(build_model(each, config.model, shape(config.data))) for each in ("none", config.encoding)]
    assert sizes[1] - sizes[0] == 4032  # liere-1, sections 4.2.1 and 5.3


@pytest.mark.parametrize("name", ["comrope-imagenet", "comrope-ucf101", "comrope-finetune"])
def test_comrope_recipes_perturb_and_decay_all_encodings(name: str) -> None:
    config = configuration(name)
    assert (config.model.jitter, config.optim.decay_encodings) == (1.0, True)
    for encoding in recipes.settings(name)["encodings"]:
        model = built(name, encoding)
        absolute = [part for part in model.modules() if isinstance(part, AbsoluteEncoding)]
        assert all(isinstance(part, LearnedAPE) and part.intensity == 1.0 for part in absolute)
        groups = parameter_groups(model, config.optim)
        decaying = {each for group in groups if group["weight_decay"] for each in group["params"]}
        assert {*model.encodings.parameters(), *(each for part in absolute for each in part.parameters())} <= decaying


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in PAPERS else ()) for name in recipes.names()],
)
def test_commands_that_a_recipe_prints_are_accepted(name: str) -> None:
    commands = [command.partition(" ")[::2] for command in recipes.find(name).commands]
    assert commands
    for command, options in commands:
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main([command, *options.split(), "--print_config"])


@pytest.mark.parametrize(
    ("encoding", "source", "settings"),
    [
        ("learned", "vit_base_patch16_224", {}),
        ("mixed", "vit_base_patch16_rope_mixed_224", {"layer_scale": 1.0}),
    ],
)
@pytest.mark.parametrize("name", ["ade20k", "coco"])
def test_recipe_of_a_head_takes_the_backbone_that_it_names(
    name: str, encoding: str, source: str, settings: dict[str, Any]
) -> None:
    assert f"timm:{source}" in recipes.find(name).text()
    given = recipes.settings(name)
    config = read_config({"seed": 0, "encoding": encoding, **given, "data": {"name": name, **given["data"]}})
    tiny = replace(config.model, size=None, dim=48, depth=4, num_heads=3, mlp_dim=192, **settings)
    features = build_features(encoding, tiny, shape(config.data))
    load_backbone(features, timm.create_model(source, embed_dim=48, depth=4, num_heads=3))


@pytest.fixture(scope="session")
def miniature_roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: MINIATURES[name](tmp_path_factory.mktemp(name)) for name in CLASSES}


def miniature(name: str, roots: dict[str, Path]) -> RunConfig:
    """Shrink a recipe to a small model, small inputs and two steps of 8 examples, or of 2 for dense tasks."""
    config = configuration(name)
    batch, step = (1, 2) if config.data.name in NAMES_DENSE else (4, 8)
    frames = {"frames": 4} if hasattr(config.data, "frames") else {}
    sizes = {"size": 32 if frames else 64} if "size" in recipes.settings(name)["data"] else {}
    frames |= {"test_views": [1, 1]} if hasattr(config.data, "test_views") else {}
    data = dict(root=str(roots[config.data.name]), batch_size=batch, train_size=2 * step, workers=0)
    optim = dict(epochs=1, effective_batch=step, milestones=[0.5] if config.optim.milestones else [])
    # compiling takes a minute
    return changed(config, model=small(config), init=None, compile=False, **data, **sizes, **frames, **optim)


def small(config: RunConfig) -> Any:
    model = config.model
    if model.backbone == "swin":
        stages = 2 if model.task == "classify" else 4
        tiny = dict(dim=16, depths=[1] * stages, stage_heads=[1] * stages, window_size=[4])
    else:
        # two axes, or three of blocks of 8
        tiny = dict(dim=48 if hasattr(config.data, "frames") else 32, depth=2, num_heads=1, mlp_dim=32)
    inputs = {"input_size": [48, 48]} if model.input_size else {}
    queries = {"num_queries": 4} if model.head in ("mask2former", "dino") else {}
    head = {} if model.task == "classify" else {"head_channels": 64 if model.head == "dino" else 32}
    return replace(model, size=None, **tiny, **inputs, **head, **queries)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PAPERS]
)
def test_recipe_trains_two_steps(name: str, miniature_roots: dict[str, Path], tmp_path: Path) -> None:
    config = miniature(name, miniature_roots)
    data = data_of(config)
    start = build_module(config, data).state_dict()
    classifier, history = train(config, data, tmp_path)
    (row,) = history.rows
    assert math.isfinite(row["train_loss"])
    assert math.isfinite(row["val_loss"])
    assert classifier.trainer.global_step == 2
    moved = {name for name, weight in classifier.state_dict().items() if not torch.equal(weight.cpu(), start[name])}
    if config.model.task == "classify":
        assert {"model.embed.proj.weight", "model.head.weight"} <= moved
    else:
        assert "model.backbone.model.embed.proj.weight" in moved
        assert any(not weight.startswith("model.backbone.") for weight in moved)
    assert any("encodings" in name for name in moved)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["liere-cifar100-vit-t", "rope-vit-s"])
def test_compiled_step_of_a_recipe_has_the_loss_of_an_eager_one(name: str) -> None:
    config = configuration(name)
    assert config.run.compile
    data = shape(replace(config.data, size=min(config.data.size, 64)))
    model = build_model(config.encoding, replace(small(config), input_size=None), data)
    inputs, labels = torch.randn(2, 3, *data.input_size), torch.tensor([0, 1])
    losses, norms = [], []
    for compiled in (False, True):
        if compiled:  # with the random numbers of an eager step for dropout and jitter
            model.compile(options={"fallback_random": True})
        model.zero_grad()
        torch.manual_seed(1)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize("name", PAPERS)
def test_recipes_with_inputs_of_one_size_are_compiled(name: str) -> None:
    assert configuration(name).run.compile == (configuration(name).model.task == "classify")


def test_second_stage_keeps_the_lattice_and_loads_weights(miniature_roots: dict[str, Path], tmp_path: Path) -> None:
    first = changed(miniature("rope-vit-b", miniature_roots), size=48, encoding="liere:8")
    start, _ = trained(first, tmp_path / "first")
    second = changed(miniature("rope-vit-b-224", miniature_roots), encoding="liere:8", init=str(tmp_path / "first"))
    second = changed(second, lr=1e-30, min_lr=0.0)
    continued, _ = trained(second, tmp_path / "second")
    assert data_of(second).input_size == (64, 64)
    torch.testing.assert_close(continued.model.positions((3, 3)), start.model.positions((3, 3)))
    torch.testing.assert_close(continued.model.state_dict(), start.model.state_dict())


def test_recipes_command_lists_all_and_prints_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out.splitlines()
    for name in recipes.names():
        (line,) = (line for line in listed if line.split()[:1] == [name])
        assert line.endswith(recipes.find(name).summary)
    assert main(["recipes", "rope-swin-t"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed) == recipes.settings("rope-swin-t")
    comments = " ".join(line.removeprefix("# ") for line in printed.splitlines() if line.startswith("#"))
    for text in ("Heo et al.", "section 4.1", "mixed 81.4", "8 GPUs, 128 examples each", "base 100", "torchrope train"):
        assert text in comments


def test_own_file_extends_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: comrope-imagenet\nmodel: {pool: mean}\ndata: {augment: {mixup: 0.5}}\n")
    with pytest.raises(SystemExit):
        main(["train", "--config", str(file), "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["encoding"] == "comrope-ld:8"
    assert (printed["model"]["pool"], printed["model"]["jitter"]) == ("mean", 1.0)
    assert (printed["data"]["augment"]["mixup"], printed["data"]["augment"]["resize_crop"]) == (0.5, 1.1)
    assert printed["optim"]["effective_batch"] == 6144


def test_options_override_files_and_files_override_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("optim: {lr: 0.5, weight_decay: 0.25}\n")
    options = ["--recipe=rope-swin-t", f"--config={file}", "--optim.lr=0.125", "--print_config"]
    printed = {}
    for command in ("train", "compare"):
        with pytest.raises(SystemExit) as done:
            main([command, *options])
        assert done.value.code == 0
        printed[command] = capsys.readouterr().out
    for text in printed.values():
        for line in ("lr: 0.125", "weight_decay: 0.25", "min_lr: 1.0e-05", "backbone: swin", "name: imagenet"):
            assert re.search(rf"^ *{re.escape(line)}$", text, re.MULTILINE), line
    assert "encoding: mixed" in printed["train"]
    assert "- bias+mixed" in printed["compare"]


def test_data_sets_have_recipes_of_their_names() -> None:
    own = [name for name in recipes.names() if name not in (*PAPERS, "demo")]
    for name in own:
        data_config(**{"name": name, **recipes.settings(name).get("data", {})})
        assert all(f"--data {name}" in command for command in recipes.find(name).commands)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
