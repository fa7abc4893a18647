"""Small videos in the folder layouts of data sets."""

from pathlib import Path

import av
import numpy as np

HEIGHT, WIDTH = 24, 32


def encode(
    path: Path, count: int = 20, *, codec: str = "mpeg4", green: int = 60, rotation: int = 0, **options: int
) -> Path:
    """A video whose red grows with the frame and whose blue grows to the right, before a stored rotation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25, options={key: str(value) for key, value in options.items()})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)  # degrees counterclockwise
        for number in range(count):
            pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
            pixels[..., 0] = 250 * number // count
            pixels[..., 1] = green
            pixels[..., 2] = np.linspace(0, 250, WIDTH)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def video_folder(root: Path, count: int) -> Path:
    for number in range(count):
        for green, name in ((20, "run"), (220, "walk")):
            encode(root / name / f"{number}.mp4", green=green)
    return root


def ucf101_folder(root: Path, groups: int = 3, clips: int = 2) -> Path:
    """As published: three groups of people, each the test list of one split."""
    lists = root / "ucfTrainTestlist"
    lists.mkdir(parents=True)
    names = ("ApplyEyeMakeup", "Biking")
    (lists / "classInd.txt").write_text("".join(f"{n} {name}\r\n" for n, name in enumerate(names, 1)))
    for split in (1, 2, 3):
        train, test = [], []
        for label, name in enumerate(names, 1):
            for group in range(1, groups + 1):
                for clip in range(1, clips + 1):
                    video = f"{name}/v_{name}_g{group:02}_c{clip:02}.avi"
                    if split == 1:
                        encode(root / "UCF-101" / video, 12, green=100 * label)
                    test.append(f"{video}\n") if group == split else train.append(f"{video} {label}\n")
        (lists / f"trainlist{split:02}.txt").write_text("".join(train))
        (lists / f"testlist{split:02}.txt").write_text("".join(test))
    return root
