"""Views of cubes: what a camera sees, what no view tells, what the poses tell."""

from typing import Any

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from torchrope_lab.data import views
from torchrope_lab.data.build import make_data
from torchrope_lab.data.config import data_config
from torchrope_lab.data.digits import split_digits
from torchrope_lab.data.views import CLASSES, FACES, Cubes, draw_cubes, look_at_faces, poses_of, tokens_of


def cubes(count: int, seed: int = 0) -> Cubes:
    images, labels, *_ = split_digits(0)
    return draw_cubes(count, images[:, 0], labels, 12, seed)


def opposite_of_zero(drawn: Cubes) -> Tensor:
    """The digit of the camera that looks the other way than the one that sees the 0."""
    forward = drawn.poses.rotation[:, :, 2]
    zero = (drawn.digits == 0).int().argmax(dim=1)
    along = (forward * forward[torch.arange(len(zero)), zero].unsqueeze(1)).sum(dim=-1)
    return drawn.digits.gather(1, along.argmin(dim=1, keepdim=True)).squeeze(1)


def test_poses_tell_the_class() -> None:
    drawn = cubes(200)
    assert torch.equal(opposite_of_zero(drawn), drawn.labels + 1)
    assert drawn.labels.bincount().tolist() == [200 // CLASSES] * CLASSES


def test_pictures_are_the_same_whatever_the_class_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all views show is drawn before classes are, so that it tells nothing of them."""
    before = cubes(50)
    orders = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *given, **options: orders(*given, **options).flip(0))
    after = cubes(50)
    assert not torch.equal(before.labels, after.labels)
    torch.testing.assert_close(before.images, after.images, rtol=0, atol=0)


@pytest.mark.parametrize("shown", ["a view with its pose", "all views"])
def test_neither_one_view_nor_all_pictures_beat_chance(shown: str) -> None:
    train, val = cubes(1500), cubes(1500, seed=1)
    parts = []
    for drawn in (train, val):
        pose = torch.cat([drawn.poses.rotation.flatten(-2), drawn.poses.translation], dim=-1)
        one = torch.cat([drawn.images.flatten(2), pose], dim=-1)[:, 0]
        parts.append(one if shown != "all views" else torch.nn.functional.one_hot(drawn.digits).flatten(1))
    model = LogisticRegression(max_iter=200, C=0.1).fit(parts[0], train.labels)
    right = model.score(parts[1], val.labels)
    assert abs(right - 1 / CLASSES) < 4 * (0.2 * 0.8 / 1500) ** 0.5  # four standard deviations of chance


def test_camera_straight_above_a_face_sees_it_upright() -> None:
    face = torch.zeros(1, 12, 12)
    face[0, 2, 9] = 1.0  # a row from the top, to the right
    down = torch.diag(torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64))[None]
    height = 1 + 2 * views.FOCAL  # the face fills the picture
    seen = look_at_faces(face, down, torch.tensor([[0.0, 0.0, height]], dtype=torch.float64), 12)
    torch.testing.assert_close(seen, face, rtol=0, atol=1e-5)


def test_camera_projects_its_face_where_its_pose_says() -> None:
    """The middle of each cube is straight behind the middle of its face, at the depth that the camera has."""
    drawn = cubes(20)
    centres = drawn.poses.centres()
    middle = centres.mean(dim=1, keepdim=True)
    distance = (centres - middle).norm(dim=-1)
    assert distance.min() > 1.5
    assert distance.max() < 2.8
    forward = drawn.poses.rotation[:, :, 2]
    towards = torch.nn.functional.normalize(middle - centres, dim=-1)
    assert ((forward * towards).sum(dim=-1) > 0.9).all()


def test_tokens_hold_patches_places_and_poses() -> None:
    drawn = cubes(10)
    tokens = tokens_of(drawn, torch.tensor(0.0), torch.tensor(1.0))
    assert tokens.shape == (10, FACES * 4, 36 + 2 + 12)
    second = tokens[3, 4 + 1]  # view 1, top right
    torch.testing.assert_close(second[:36].view(6, 6), drawn.images[3, 1, :6, 6:])
    torch.testing.assert_close(poses_of(tokens[:, ::4, 38:]).centres(), drawn.poses.centres(), atol=1e-5, rtol=1e-5)


def load(**options: Any) -> Any:
    data = make_data(data_config("views", train_size=20, val_size=10, **options))
    data.setup("fit")
    return data


def test_data_module_splits_digits_and_repeats_itself() -> None:
    data, again = load(), load()
    inputs, labels = next(iter(data.train_dataloader()))
    assert inputs.shape[1:] == data.example_shape
    assert len(labels) == 20
    assert data.counts == (20, 10)
    assert data.fingerprint == again.fingerprint != load(split_seed=1).fingerprint
    torch.testing.assert_close(data._datasets[0].inputs, again._datasets[0].inputs)


def test_sizes_that_patches_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the 6 pixels"):
        data_config("views", size=8)
    with pytest.raises(ValueError, match="5 or more"):
        cubes(4)
