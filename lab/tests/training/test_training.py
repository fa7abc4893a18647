"""Training: schedule, weight decay, resuming, evaluation and costs."""

import os
from pathlib import Path

import pytest
import torch
from processes import data_of
from small_runs import Killed, die_in_epoch_2, same_weights, small_run, trained, without_times

import torchrope as tr
from torchrope.files import write_whole
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config
from torchrope_lab.data.transforms import shuffle_patches
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig
from torchrope_lab.statistics import accuracy_interval
from torchrope_lab.training.classifier import Classifier
from torchrope_lab.training.cost import count_encoding_parameters, count_flops, measure_costs
from torchrope_lab.training.evaluate import evaluate, predict, scaled_sizes
from torchrope_lab.training.models import build_vit
from torchrope_lab.training.module import MeanLoss
from torchrope_lab.training.run import load

SMALL = ModelConfig(dim=16, depth=1, num_heads=2, mlp_dim=16, patch_size=[2], pool="mean", dropout=0.1)


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    config = small_run(epochs=3, encoding="learned+liere:4", dropout=0.1)
    whole, curve = trained(config, tmp_path / "whole")
    with pytest.raises(Killed):
        trained(config, tmp_path / "killed", on_epoch=die_in_epoch_2)
    seen: list[float] = []
    resumed, again = trained(config, tmp_path / "killed", on_epoch=lambda row: seen.append(row["epoch"]))
    assert seen == [2, 3]  # epoch 2 was interrupted; epoch 1 is not trained again
    assert same_weights(whole, resumed)
    assert without_times(curve) == without_times(again)
    assert (tmp_path / "killed" / "curve.csv").read_text().startswith("epoch,train_loss,val_loss,val_top1,seconds\n1,")


def test_finished_run_is_loaded_and_not_trained_again(tmp_path: Path) -> None:
    config = small_run(epochs=1)
    module, _ = trained(config, tmp_path)
    again, curve = trained(config, tmp_path, on_epoch=lambda _: pytest.fail("trained again"))
    stored, data, loaded = load(tmp_path)
    assert stored == config
    assert len(curve.rows) == 1
    for model in (again, loaded):
        assert torch.equal(model.model.head.weight, module.model.head.weight)
    assert evaluate(loaded.model, data).top1 == evaluate(module.model, data).top1


@pytest.mark.parametrize("content", ["- a list\n", "encoding: mixed\n"])
def test_load_rejects_a_folder_without_a_run(tmp_path: Path, content: str) -> None:
    rule = r"a run's folder must contain config\.yaml and weights\.safetensors or checkpoint\.ckpt, got"
    with pytest.raises(ValueError, match=rule):
        load(tmp_path)
    (tmp_path / "checkpoint.ckpt").touch()
    (tmp_path / "config.yaml").write_text(content)
    rule = r"config.yaml must (be the configuration of a torchrope run|hold named settings), got"
    with pytest.raises(ValueError, match=rule):
        load(tmp_path)


def test_evaluate_equals_a_manual_count() -> None:
    data = data_of(small_run())
    bag = build_vit("none", SMALL, data)
    measured = evaluate(bag, data, [(8, 8), (16, 16)])
    labels, logits = predict(bag, data)
    assert measured.top1 == pytest.approx(sum(int(p == t) for p, t in zip(logits.argmax(-1), labels, strict=True)) / 40)
    assert measured.shuffled_top1 == pytest.approx(measured.top1)  # without positions, order has no effect
    assert measured.val_loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item())
    assert [(at.size, at.inputs) for at in measured.resolutions] == [((8, 8), "trained"), ((16, 16), "resampled")]
    written = measured.measures()
    top1, low, high = accuracy_interval(measured.correct)
    trained = {"size": [8, 8], "inputs": "trained", "enlarged": 0, "top1": top1, "interval": [low, high]}
    assert written["resolutions"][0] == trained
    assert (written["top1"], written["interval"]) == (top1, [low, high])
    assert 0 <= written["resolutions"][1]["interval"][0] <= measured.resolutions[1].top1


def test_correct_shuffled_permutes_patches() -> None:
    data = data_of(small_run(val_size=60))
    torch.manual_seed(0)
    model = build_vit("learned", SMALL, data)
    torch.nn.init.normal_(model.absolute.table)
    measured = evaluate(model, data)
    generator, right = torch.Generator().manual_seed(0), 0
    for inputs, labels in data.val_dataloader():
        right += int((model.eval()(shuffle_patches(inputs, 2, generator)).argmax(-1) == labels).sum())
    assert measured.shuffled_top1 == pytest.approx(right / 60)
    assert measured.shuffled_top1 != measured.top1


def test_evaluate_averages_views_at_the_training_size(monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_of(small_run())
    model = build_vit("none", SMALL, data)
    labels, _ = predict(model, data)
    monkeypatch.setattr(data, "views", 3, raising=False)
    monkeypatch.setattr(data, "test_dataloader", data.val_dataloader)
    right, one = torch.nn.functional.one_hot(labels, 10).float(), predict

    def averaged(*given, views=1, **options):
        return (labels, right) if views == 3 else one(*given, **options)

    monkeypatch.setattr("torchrope_lab.training.evaluate.predict", averaged)
    measured = evaluate(model, data, [(16, 16)])
    assert measured.top1 == 1
    assert [at.top1 == 1 for at in measured.resolutions] == [True, False]


@pytest.mark.parametrize("training", [False, True])
def test_predict_restores_training_mode_and_repeats(training: bool) -> None:
    data = data_of(small_run())
    model = build_vit("none", SMALL, data).train(training)
    first, second = predict(model, data)[1], predict(model, data)[1]
    assert torch.equal(first, second), "dropout"
    assert {module.training for module in model.modules()} == {training}


def test_scaled_sizes_keep_time_and_depth() -> None:
    motion = make_data(data_config(name="motion"))
    assert scaled_sizes(motion, (1, 4, 4), [0.5, 1.0, 1.5]) == [(5, 8, 8), (5, 20, 20), (5, 32, 32)]
    motion.axes = ("depth", "height", "width")
    assert scaled_sizes(motion, (1, 4, 4), [1.5]) == [(5, 20, 20), (5, 32, 32)]
    digits = make_data(data_config())
    assert scaled_sizes(digits, (1, 1), [0.01, 2.0]) == [(1, 1), (8, 8), (16, 16)]


def test_costs_are_counted() -> None:
    data = data_of(small_run())
    builders = {name: (lambda name=name: build_vit(name, SMALL, data)) for name in ("none", "mixed", "liere")}
    costs = measure_costs(builders, next(iter(data.train_dataloader())), rounds=4)
    assert [costs[name].encoding_parameters for name in builders] == [0, 2 * 2 * 4, 2 * 2 * 28]
    assert costs["mixed"].parameters - costs["none"].parameters == 16
    assert costs["liere"].flops > costs["mixed"].flops == costs["none"].flops
    for cost in costs.values():
        assert cost.step_seconds > 0
        assert cost.peak_memory_bytes > 4 * cost.parameters


def test_costs_are_those_of_the_precision() -> None:
    seen: list[torch.dtype] = []

    class Seen(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            out = super().forward(inputs)
            if not out.is_meta:  # where operations are counted
                seen.append(out.dtype)
            return out

    batch = torch.randn(3, 4), torch.tensor([0, 1, 2])
    for precision, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        measure_costs({"one": lambda: Seen(4, 5)}, batch, rounds=1, precision=precision)
        assert {*seen} == {dtype}
        seen.clear()


def test_count_flops_counts_two_per_multiply_add() -> None:
    layer = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
    assert count_flops(lambda: layer, torch.Size([3, 3, 2, 2])) == 2 * 3 * 12 * 5
    attention = tr.Attention(8, 2)
    tokens, dim = 6, 8
    expected = 2 * tokens * dim * 4 * dim + 2 * 2 * tokens * tokens * dim
    assert count_flops(lambda: attention, torch.Size([1, tokens, dim])) == expected


def test_encoding_parameters_count_shared_ones_once() -> None:
    data = make_data(data_config())
    shared = build_vit("mixed", ModelConfig(dim=16, depth=3, num_heads=2, share_layers=True, share_heads=True), data)
    assert count_encoding_parameters(shared) == 2 * 4


def test_write_whole_propagates_keyboard_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def interrupted(old: str, new: Path) -> None:
        replace(old, new)
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file.txt", "new")
    assert (tmp_path / "file.txt").read_text() == "new"


def test_size_is_overridden_by_single_settings() -> None:
    with torch.device("meta"):
        model = build_vit("none", ModelConfig(size="small", depth=2, patch_size=[4]), make_data(data_config()))
    assert (len(model.layers), model.norm.normalized_shape, model.layers[0].attention.num_heads) == (2, (384,), 6)


def test_training_step_reads_no_number_from_the_device() -> None:
    with torch.device("meta"):  # whose tensors have no values, so that reading one raises
        module = Classifier(torch.nn.Linear(4, 3), 3, OptimConfig())
        inputs, labels = torch.empty(2, 4), torch.zeros(2, dtype=torch.long)
        loss = module.training_step([inputs, labels], 0)
    assert loss.is_meta
    assert module.train_loss.mean_value.is_meta


def test_mean_loss_leaves_out_nan() -> None:
    mean = MeanLoss()
    for value, weight in ((1.0, 3), (float("nan"), 4), (5.0, 1)):
        mean.update(torch.tensor(value), weight)
    assert mean.compute() == 2.0
    mean.update(torch.tensor(float("inf")), 1)
    assert mean.compute() == float("inf")
