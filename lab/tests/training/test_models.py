"""Building models from configurations, initialising them from another run, and the loss."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import SWIN, changed, same_weights
from timm.loss import BinaryCrossEntropy
from torch.nn import functional

import torchrope as tr
from torchrope.models import Swin
from torchrope_lab.cli import main
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.results import StudyResult
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig, RunConfig
from torchrope_lab.training.classifier import training_loss
from torchrope_lab.training.cost import count_encoding_parameters
from torchrope_lab.training.initial import initialise
from torchrope_lab.training.models import build_model, build_vit, check_patches
from torchrope_lab.training.optim import parameter_groups
from torchrope_lab.training.run import build_module, load, train

SMALL = ModelConfig(dim=32, depth=2, num_heads=2, mlp_dim=16, patch_size=[2])


def shape(*sizes: int, classes: int = 10) -> SimpleNamespace:
    """What a model is built from of images or clips."""
    axes = ("time", "height", "width")[-len(sizes) :]
    return SimpleNamespace(
        input_size=sizes, in_channels=1, num_classes=classes, axes=axes, tasks=("classify",), lattice=True
    )


PIXELS, CLIPS = shape(8, 12), shape(4, 8, 8)


def test_build_model_builds_a_swin() -> None:
    torch.manual_seed(0)
    model = build_model("bias+mixed", SWIN, PIXELS)
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(dim=8, depths=(1, 1), num_heads=(1, 2), window_size=2, patch_size=2, drop_path=0.0)
    same = Swin((8, 12), in_channels=1, num_outputs=10, encoding="bias+mixed", **sizes)
    x = torch.randn(2, 1, 8, 12)
    torch.testing.assert_close(model.eval()(x), same.eval()(x), rtol=0, atol=0)
    with torch.device("meta"):
        named = build_model("bias", ModelConfig(backbone="swin", size="small", patch_size=[2]), PIXELS)
    assert [len(stage.layers) for stage in named.stages] == [2, 2, 18, 2]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (dict(backbone="swin", depth=3), "depth is a setting of backbone vit and transformer only, got 3"),
        (dict(backbone="swin", jitter=1.0), "jitter is a setting of backbone vit only, got 1.0"),
        (dict(backbone="swin", weight_init="torch"), "weight_init is a setting of backbone vit only, got torch"),
        (dict(backbone="swin", norm_eps=1e-5), "norm_eps is a setting of backbone vit and transformer only, got"),
        (dict(backbone="swin", attention="linear"), "attention is a setting of backbone transformer only, got linear"),
        (dict(depths=[1]), r"depths is a setting of backbone swin only, got \[1\]"),
        (dict(backbone="transformer", patch_size=[2]), "patch_size is a setting of backbone vit and swin only, got"),
        (dict(backbone="transformer", jitter=2.0), "jitter is a setting of backbone vit only, got 2.0"),
        (dict(backbone="transformer", head="upernet"), "head must be classify with backbone transformer, got"),
        (dict(backbone="transformer", attention="quick"), "attention must be one of softmax, linear, got 'quick'"),
        (dict(window_size=[2]), "window_size is a setting of backbone swin, or of vit with another head than classify"),
        (dict(head="upernet", global_layers=[1]), "global_layers is for a vit with window_size, got"),
        (dict(head_channels=8), "head_channels is a setting of head upernet and mask2former and dino only, got 8"),
        (dict(head="upernet", head_channels=0), "head_channels must be 1 or more, got 0"),
        (dict(head="upernet", num_queries=3), "num_queries is a setting of head mask2former and dino only, got 3"),
        (dict(head="dino", head_dropout=0.1), "head_dropout is a setting of head upernet only, got 0.1"),
        (dict(head="yolo"), "head must be one of classify, upernet, mask2former, dino, got"),
    ],
    ids=lambda given: ",".join(f"{name}={given[name]}" for name in given) if isinstance(given, dict) else "refused",
)
def test_settings_of_another_backbone_or_head_raise(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=f"^{rule}"):
        ModelConfig(**settings)


@pytest.mark.slow
def test_compare_command_trains_a_swin(tmp_path: Path) -> None:
    (tmp_path / "swin.yaml").write_text("model: {backbone: swin, depth: null, depths: [1, 1], stage_heads: [1, 1]}\n")
    options = [f"--config={tmp_path / 'swin.yaml'}", "--model.dim=8"]
    options += [f"--model.{name}=null" for name in ("size", "num_heads", "mlp_dim")]
    options += ["--model.window_size=[4]", "--data.train_size=40", "--data.val_size=20", "--epochs=1", "--seeds=1"]
    assert main(["compare", *options, "--scales=[1,1.5]", "--encodings=bias,mixed", f"--out={tmp_path / 'out'}"]) == 0
    tables = {table.title: table for table in StudyResult.read(tmp_path / "out" / "results.json").findings.tables}
    kinds = {row["name"]: row["kind"] for row in tables["The encodings"].rows}
    assert kinds == {"bias": "not rotary", "mixed": "rotary, relative"}
    assert {row["name"]: row["encoding_parameters"] for row in tables["Costs"].rows}["mixed"] == 8 + 16


def test_jitter_moves_patches_within_cells_in_training_only() -> None:
    plain = build_model("comrope-ld:4", SMALL, PIXELS)
    model = build_model("comrope-ld:4", replace(SMALL, jitter=1.0), PIXELS)
    lattice = plain.positions((4, 6))
    torch.testing.assert_close(model.eval().positions((4, 6)), lattice, rtol=0, atol=0)
    model.train()
    torch.manual_seed(0)
    first, second = model.positions((4, 6)), model.positions((4, 6))
    torch.manual_seed(0)
    torch.testing.assert_close(model.positions((4, 6)), first, rtol=0, atol=0)
    assert not torch.equal(first, second)
    cells = torch.tensor([1 / 4, 1 / 6])
    off = (first - lattice)[1:] / cells  # without the class token
    assert off.abs().max() <= 0.5 + 1e-6
    assert off.abs().mean() > 0.2  # N(0, 0.5) clipped at 0.5 has mean 0.31
    assert torch.equal(first[0], lattice[0])


def test_jitter_keeps_time_and_the_configured_lattice() -> None:
    config = replace(SMALL, dim=48, jitter=2.0, spacing=[3.0])
    model = build_model("comrope-ld:4", config, CLIPS).train()
    places = model.positions((2, 4, 4))[1:]
    lattice = tr.grid(2, 4, 4, spacing=3.0, origin=[1 / 4, 1 / 8, 1 / 8])  # ComRoPE's
    torch.testing.assert_close(places[:, 0], lattice[:, 0], rtol=0, atol=0)
    assert ((places - lattice)[:, 1:].abs() <= 1.5 + 1e-6).all()
    assert (places - lattice)[:, 1:].abs().max() > 1.0


@pytest.mark.parametrize(
    ("patch", "size", "fewer"), [(1, 24, "--model.patch_size 2 gives 144"), (1, 16, ""), (2, 48, "")]
)
def test_many_patches_of_1_are_warned_of(patch: int, size: int, fewer: str, caplog: pytest.LogCaptureFixture) -> None:
    data = make_data(data_config("images", root=".", size=size))
    check_patches(ModelConfig(patch_size=[patch]), data)
    assert [message.partition("; ")[2] for message in caplog.messages] == ([fewer] if fewer else [])


def test_rotary_dim_applies_if_the_head_does_not_fit() -> None:
    config = replace(SMALL, dim=32, num_heads=2, rotary_dim=12)
    for name, rotary_dim in (("visionllama", 12), ("axial", 12), ("liere:8", 16), ("mixed", 16)):
        assert build_model(name, config, CLIPS).encodings[0].rotary_dim == rotary_dim
    with pytest.raises(ValueError, match=r"divisible by 2·num_axes = 6, got 16; --model\.rotary_dim 12 would"):
        build_model("visionllama", replace(config, rotary_dim=None), CLIPS)
    with pytest.raises(ValueError, match="rotary_dim must be divisible by 2·num_axes = 6, got 10"):
        build_model("visionllama", replace(config, rotary_dim=10), CLIPS)
    build_model("learned", config, CLIPS)


def test_jittered_table_uses_jitter_except_along_time() -> None:
    perturbed = build_model("learned-jittered", replace(SMALL, dim=48, jitter=0.5), CLIPS).absolute
    assert (perturbed.intensity, perturbed.cell) == (0.5, (0.0, 1.0, 1.0))
    assert build_model("learned-jittered", SMALL, PIXELS).absolute.intensity == 1.0
    assert build_model("learned-jittered", SWIN, PIXELS).absolute.cell == (1.0, 1.0)


def test_build_model_applies_init_norms_and_stochastic_depth() -> None:
    config = replace(SMALL, weight_init="torch", norm_eps=1e-5, drop_path=0.3, drop_path_schedule="constant")
    model = build_model("learned", config, PIXELS)
    assert model.weight_init == "torch"
    assert {module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)} == {1e-5}
    assert [layer.drop_path.p for layer in model.layers] == [0.3, 0.3]
    assert build_model("learned", SMALL, PIXELS).norm.eps == 1e-6
    swin = build_model("bias", replace(SWIN, drop_path=0.3, drop_path_schedule="constant"), PIXELS)
    assert {layer.drop_path.p for stage in swin.stages for layer in stage.layers} == {0.3}


def test_decay_encodings_includes_encodings_and_tokens() -> None:
    model = build_model("learned+comrope-ld:4", SMALL, PIXELS)
    names = {parameter: name for name, parameter in model.named_parameters()}

    def decaying(**settings: Any) -> set[str]:
        groups = parameter_groups(model, OptimConfig(weight_decay=0.1, **settings))
        return {names[each] for group in groups if group["weight_decay"] for each in group["params"]}

    added = decaying(decay_encodings=True) - decaying()
    own = {f"encodings.{layer}.{part}" for layer in range(2) for part in ("upper", "factors")}
    assert added == {"prefix_tokens", "absolute.table", *own}
    assert decaying() <= decaying(decay_encodings=True)
    assert not {name for name in decaying(decay_encodings=True) if "norm" in name or name.endswith("bias")}


@pytest.fixture(scope="module")
def digits() -> DataModule:
    data = make_data(data_config(train_size=40, val_size=20))
    data.setup()
    return data


@pytest.fixture(scope="module")
def trained(digits: DataModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "learned"
    train(run("learned", digits), digits, folder)
    return folder


def run(encoding: str, data: DataModule, **settings: Any) -> RunConfig:
    return RunConfig(encoding=encoding, data=data.config, model=SMALL, optim=OptimConfig(epochs=1), **settings)


@pytest.mark.parametrize("rotary", ["", "+comrope-ld:8", "+comrope-ap:8", "+liere:4", "-jittered+comrope-liere:8"])
def test_init_keeps_outputs_with_another_encoding(rotary: str, digits: DataModule, trained: Path) -> None:
    theirs = load(trained)[2].model.cpu().eval()
    mine = build_module(run(f"learned{rotary}", digits), digits).model.eval()
    initialise(mine, str(trained))
    inputs = next(iter(digits.val_dataloader()))[0]
    torch.testing.assert_close(mine(inputs), theirs(inputs), rtol=0, atol=0)


def test_init_loads_generators_of_the_same_encoding(digits: DataModule, tmp_path: Path) -> None:
    classifier, _ = train(run("liere:4", digits), digits, tmp_path)
    mine = build_module(run("liere:4", digits, seed=1), digits).model
    initialise(mine, str(tmp_path))
    assert same_weights(mine, classifier.model)


def test_init_is_not_needed_to_resume(digits: DataModule, trained: Path, tmp_path: Path) -> None:
    config = changed(run("learned", digits, init=str(trained)), lr=1e-30)
    started, _ = train(config, digits, tmp_path)
    torch.testing.assert_close(started.model.state_dict(), load(trained)[2].model.state_dict())
    elsewhere = trained.rename(trained.with_name("elsewhere"))
    try:
        train(config, digits, tmp_path)
    finally:
        elsewhere.rename(trained)


def test_init_initialises_a_head_for_other_classes(trained: Path) -> None:
    model = build_model("learned", SMALL, shape(8, 8, classes=3))
    head = model.head.weight.clone()
    initialise(model, str(trained))
    assert torch.equal(model.head.weight, head)
    torch.testing.assert_close(model.embed.proj.weight.cpu(), load(trained)[2].model.embed.proj.weight.cpu())


def test_init_rejects_other_models(digits: DataModule, trained: Path) -> None:
    deeper = build_model("learned", replace(SMALL, depth=3), digits)
    with pytest.raises(ValueError, match=r"^init must be the same model .*, got layers\.2\S* None"):
        initialise(deeper, str(trained))
    with pytest.raises(ValueError, match=r"got absolute\S+ \(.*\) instead of None in "):
        initialise(build_model("mixed", SMALL, digits), str(trained))


@pytest.mark.parametrize("mixed", [False, True])
def test_bce_equals_timm(mixed: bool) -> None:
    logits = torch.randn(6, 5)
    labels = torch.tensor([0, 4, 2, 2, 1, 3])
    if mixed:
        shares = functional.one_hot(labels, 5).float()
        labels = 0.7 * shares + 0.3 * shares.roll(1, 0)
    theirs = BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0 if mixed else None)(logits, labels)
    torch.testing.assert_close(training_loss(logits, labels, OptimConfig(loss="bce")), theirs)


def test_bce_rejects_label_smoothing() -> None:
    with pytest.raises(ValueError, match=r"^label_smoothing is for cross-entropy only, got 0\.1"):
        OptimConfig(loss="bce", label_smoothing=0.1)


def test_build_vit_accepts_a_bias_by_name() -> None:
    model = build_vit("bias+mixed", ModelConfig(dim=16, depth=2, num_heads=2), make_data(data_config()))
    assert [bias.num_heads for bias in model.biases] == [2, 2]


@pytest.mark.parametrize(("share_layers", "tables"), [(False, 2), (True, 1)])
def test_bias_tables_count_as_parameters_of_the_encoding(share_layers: bool, tables: int) -> None:
    config = ModelConfig(dim=16, depth=2, num_heads=2, patch_size=[2], share_layers=share_layers)
    assert count_encoding_parameters(build_vit("bias", config, make_data(data_config()))) == tables * 7 * 7 * 2
