"""Frames and crops of a video for training and for testing.

The formulas are those of VideoMAE (Tong et al., arXiv:2203.12602; `VideoClsDataset` of MCG-NJU/VideoMAE), which LieRE
uses for its videos.
"""

import torch


def training_frames(count: int, frames: int, stride: int) -> list[int]:
    """Choose `frames` evenly spaced indices in a random window of frames · stride frames, including both its ends."""
    # A video of at most frames · stride frames gives count // stride frames, evenly spaced over the whole video, and
    # then repeats its last frame. Draws from torch's global generator.
    span = frames * stride
    if count <= span:
        chosen = count // stride
        return _spread(0, count, chosen) + [count - 1] * (frames - chosen)
    start = int(torch.randint(count - span, ()))
    return _spread(start, span, frames)


def test_frames(count: int, frames: int, stride: int, segments: int) -> list[list[int]]:
    """Return `segments` evenly spaced clips of `frames` frames, `stride` frames apart; a single one is centred."""
    # The last frame is repeated for videos that are too short.
    strided = list(range(0, count, stride))
    strided += [strided[-1]] * (frames - len(strided))
    return [strided[start : start + frames] for start in _starts(len(strided) - frames, segments)]


test_frames.__test__ = False  # type: ignore[attr-defined]  # keeps pytest from collecting it


def crop_corners(height: int, width: int, size: int, crops: int) -> list[tuple[int, int]]:
    """Return (top, left) of `crops` squares along the longer side, from one end to the other; one is in the centre."""
    tops = _starts(height - size, crops if height >= width else 1)
    lefts = _starts(width - size, crops if height < width else 1)
    return [(top, left) for top in tops for left in lefts]


def _spread(start: int, span: int, number: int) -> list[int]:
    """Return the integer parts of `number` equidistant values in [start, start + span)."""
    return [start + min(span * place // max(1, number - 1), span - 1) for place in range(number)]


def _starts(span: int, number: int) -> list[int]:
    return [span // 2] if number == 1 else [place * span // (number - 1) for place in range(number)]
