"""The table that `torchrope evaluate` prints."""

from torchrope_lab.report.evaluation import evaluation_table


def at(size: int, top1: float, inputs: str, enlarged: int = 0) -> dict[str, object]:
    interval = [top1 / 2, (1 + top1) / 2]
    return {"size": [size, size], "inputs": inputs, "enlarged": enlarged, "top1": top1, "interval": interval}


def test_classifier_has_its_sizes_the_trained_one_first() -> None:
    measures = {
        "top1": 0.9725,
        "interval": [0.95, 0.99],
        "val_loss": 0.1234,
        "shuffled_top1": 0.5,
        "resolutions": [at(4, 0.25, "resampled"), at(8, 0.9725, "trained"), at(16, 1, "read", 12)],
    }
    table = [
        "input size             inputs                  top-1 % [95 %]   loss",
        "---------------------  -----------------  -------------------  -----",
        "8×8 (trained)          –                    97.2 [95.0, 99.0]  0.123",
        "8×8, patches shuffled  –                                 50.0      –",
        "4×4                    resampled            25.0 [12.5, 62.5]      –",
        "16×16                  read, 12 enlarged  100.0 [50.0, 100.0]      –",
    ]
    assert evaluation_table(measures, (8, 8)).splitlines() == table
    asked = {"crop_ratio": 0.875, "window_size": "grow", "positions": "range", "normalise": "half"}
    told = "crop ratio: 0.875, window size at other sizes: grow, positions: same range as in training, normalised: half"
    assert evaluation_table({**measures, **asked}, (8, 8)).splitlines() == [*table, "", told]


def test_loss_that_is_not_known_is_a_dash() -> None:
    measures = {"top1": 0.5, "interval": [0.5, 0.5], "val_loss": None, "shuffled_top1": 0.5, "resolutions": []}
    row = ["8", "(trained)", "–", "50.0", "[50.0,", "50.0]", "–"]
    assert evaluation_table(measures, (8,)).splitlines()[2].split() == row


def test_detection_and_segmentation_have_the_interval_of_their_measure() -> None:
    found = {"ap": 0.3, "ap50": 0.5, "interval": [0.25, 0.35], "images": 20}
    assert evaluation_table(found, (64, 64)).splitlines() == [
        "measure           % [95 %]",
        "-------  -----------------",
        "AP       30.0 [25.0, 35.0]",
        "AP50                  50.0",
        "",
        "20 images",
    ]
    named = {"miou": 0.4, "interval": [0.3, 0.5], "images": 2, "crop": 48, "scales": [0.75, 1.0], "flip": True}
    lines = evaluation_table(named, (64, 64)).splitlines()
    assert lines[2] == "mIoU     40.0 [30.0, 50.0]"
    assert lines[4] == "2 images, windows of 48 pixels, sizes × 0.75, 1, horizontal-flip augmentation"


def test_classifier_has_auroc_and_the_sensitivity_of_few_classes() -> None:
    measures = {"top1": 0.5, "interval": [0.5, 0.5], "val_loss": None, "shuffled_top1": 0.5, "resolutions": []}
    of_classes = {"auroc": 0.91234, "sensitivity": {"benign": 0.975, "malign": 0.25}}
    assert evaluation_table({**measures, **of_classes}, (8,)).splitlines()[4:] == [
        "",
        "AUROC, one class against the others, mean over classes: 0.912",
        "",
        "class   sensitivity %",
        "------  -------------",
        "benign           97.5",
        "malign           25.0",
    ]
    many = {"auroc": 0.5, "sensitivity": {f"class {number}": 0.5 for number in range(21)}}
    assert evaluation_table({**measures, **many}, (8,)).splitlines()[4:] == [
        "",
        "AUROC, one class against the others, mean over classes: 0.500",
    ]
