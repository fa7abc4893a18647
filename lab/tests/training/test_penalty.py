"""Measures of rare classes."""

import pytest
import torch
from sklearn.metrics import recall_score, roc_auc_score

from torchrope_lab.training.evaluate import class_measures


def test_class_measures_equal_scikit_learn() -> None:
    torch.manual_seed(0)
    labels, logits = torch.randint(3, (200,)), torch.randn(200, 3)
    logits[torch.arange(200), labels] += 0.7
    measured = class_measures(labels, logits, ("benign", "rare", "malign"))
    shares = logits.softmax(dim=-1)
    assert measured["auroc"] == pytest.approx(roc_auc_score(labels, shares, multi_class="ovr", average="macro"))
    recalls = recall_score(labels, logits.argmax(dim=-1), average=None)
    assert measured["sensitivity"] == pytest.approx(dict(zip(("benign", "rare", "malign"), recalls, strict=True)))


def test_class_measures_leave_out_classes_without_examples() -> None:
    labels, logits = torch.tensor([0, 0, 2, 2]), torch.tensor([[3.0, 0, 1], [1, 0, 2], [0, 0, 4], [0, 0, 1]])
    measured = class_measures(labels, logits, ("a", "b", "c"))
    assert measured["sensitivity"] == {"a": 0.5, "c": 1.0}
    assert measured["auroc"] == pytest.approx((1 + 0.75) / 2)
    assert class_measures(labels[:2], logits[:2], "abc")["auroc"] is None
    assert class_measures(labels, logits / 0, "abc")["auroc"] is None


def test_auroc_ranks_examples_whose_probabilities_round_to_one() -> None:
    logits = torch.stack([torch.zeros(6), 40 + torch.arange(6.0), torch.full((6,), -3.0)], dim=1)
    assert class_measures(torch.tensor([0, 0, 0, 1, 1, 1]), logits, "abc")["auroc"] == 1
