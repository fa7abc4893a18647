"""Tests of transparent pictures: whatever stores the transparency, they are composed on white."""

import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from torchrope_lab.data import images
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config


def line_art(mode: str, dtype: type = np.uint8) -> tuple[np.ndarray, np.ndarray]:
    """A black line on a transparent, black ground, a pixel of half the opacity, and what it is on white."""
    top = np.iinfo(dtype).max
    alpha = np.zeros((4, 6), dtype)
    alpha[1], alpha[2, 0] = top, top // 2 + 1
    pixels = np.zeros((4, 6, len(mode)), dtype)
    pixels[..., -1] = alpha
    return pixels, np.stack([(255 - (alpha >> (8 * alpha.itemsize - 8))).astype(np.uint8)] * 3, axis=-1)


def png(bits: int, colour: int, pixels: np.ndarray, key: bytes = b"") -> bytes:
    """A PNG of a bit depth and colour type that Pillow does not write."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    height, width = pixels.shape[:2]
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    rows = b"".join(b"\0" + row.astype(f">u{bits // 8}").tobytes() for row in pixels)
    transparent = chunk(b"tRNS", key) if key else b""
    return b"\x89PNG\r\n\x1a\n" + header + transparent + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("suffix", ["png", "webp", "tif"])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_black_line_on_transparent_ground_is_on_white(tmp_path, mode, suffix):
    pixels, on_white = line_art(mode)
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(pixels).save(path, **({"lossless": True} if suffix == "webp" else {}))
    assert np.array_equal(images.load_image(path), on_white)


@pytest.mark.parametrize(("mode", "colour"), [("RGBA", 6), ("LA", 4)])
def test_16_bit_alpha_is_composed_on_white(tmp_path, mode, colour):
    pixels, on_white = line_art(mode, np.uint16)
    (tmp_path / "a.png").write_bytes(png(16, colour, pixels))
    assert np.array_equal(images.load_image(tmp_path / "a.png"), on_white)


@pytest.mark.parametrize("mode", ["La", "RGBa"])
def test_premultiplied_alpha_is_composed_on_white(mode):
    pixels, on_white = line_art(mode)
    image, transparent = images.compose_on_white(Image.fromarray(pixels).convert(mode))
    assert transparent
    assert np.array_equal(image, on_white)


@pytest.mark.parametrize("mode", ["P", "L", "RGB", "1"])
def test_transparent_colour_is_white(tmp_path, mode):
    pixels = Image.new("L", (6, 4), 0)
    pixels.paste(255, (0, 1, 6, 2))
    stored = pixels.convert(mode)
    black = stored.getpixel((0, 0))
    stored.save(tmp_path / "a.png", transparency=black)
    read, transparent = images.decode(tmp_path / "a.png")
    assert transparent
    assert np.asarray(read).min() == 255
    stored.save(tmp_path / "a.png")
    read, transparent = images.decode(tmp_path / "a.png")
    assert not transparent
    assert (np.asarray(read) == np.asarray(pixels)[..., None]).all()


@pytest.mark.parametrize(("colour", "key"), [(0, struct.pack(">H", 0x1234)), (2, struct.pack(">HHH", 0x1234, 7, 0))])
def test_transparent_colour_of_16_bits_is_white(tmp_path, colour, key):
    pixels = np.full((2, 2, len(key) // 2), 0x8000, np.uint16)
    pixels[0, 0] = np.frombuffer(key, ">u2")
    (tmp_path / "a.png").write_bytes(png(16, colour, pixels, key))
    read = np.asarray(images.load_image(tmp_path / "a.png"))
    assert read[0, 0].tolist() == [255] * 3
    assert read[1].tolist() == [[0x80] * 3] * 2


def test_transparent_images_of_a_folder_are_counted_in_one_line(tmp_path, caplog):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.new("RGB", (40, 40), (30 * number, 60, 90)).save(tmp_path / name / f"{number}.png")
        Image.new("RGBA", (40, 40)).save(tmp_path / name / "drawing.png")
        Image.new("RGBA", (40, 40), "red").save(tmp_path / name / "opaque.png")
    data = make_data(data_config("images", root=str(tmp_path)))
    data.setup()
    assert caplog.messages == ["2 of 12 images are transparent and composed on white"]
    assert data.description.endswith("the class is the sub-folder. 2 are transparent and composed on white.")


def test_transparent_frames_of_a_video_are_on_white(tmp_path):
    av = pytest.importorskip("av")
    from torchrope_lab.data.videos import read_clips

    pixels, on_white = line_art("RGBA")
    with av.open(str(tmp_path / "a.mov"), "w") as container:
        stream = container.add_stream("qtrle", rate=25, width=6, height=4, pix_fmt="argb")
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgba")))
        container.mux(stream.encode())
    (clip,) = read_clips(tmp_path / "a.mov", lambda count: [list(range(count))])
    assert clip.shape == (3, 3, 4, 6)
    assert torch.equal(clip[0].movedim(0, -1), torch.from_numpy(on_white))
