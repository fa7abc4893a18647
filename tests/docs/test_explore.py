"""docs/explore.html: its numbers are those of torchrope; it works by keyboard, on a phone and in dark mode."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chromium import BINARY, Chromium
from torch import Tensor

import torchrope as tr
from torchrope.encodings import parse_encoding

PAGE = Path(__file__).parents[2] / "docs/explore.html"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BINARY is None, reason="chromium is not installed")]

CASES: list[tuple[str, int, int, int, dict[str, Any]]] = [
    # name, num_axes, head_dim, num_heads, parameters
    ("axial", 1, 64, 1, {}),
    ("axial", 2, 64, 4, {}),
    ("axial", 3, 48, 2, {"base": 50}),
    ("mixed", 1, 16, 2, {}),
    ("mixed", 2, 64, 6, {}),
    ("mixed", 2, 6, 3, {"base": 100}),
    ("mixed", 3, 64, 4, {"base": 25.5}),
    ("golden", 1, 32, 2, {}),
    ("golden", 2, 64, 6, {}),
    ("golden", 2, 32, 3, {"min_frequency": 0.5, "max_frequency": 40}),
    ("golden", 3, 96, 12, {}),
    ("golden", 2, 2, 1, {}),
    ("dinov3", 2, 64, 6, {}),
    ("dinov3", 3, 48, 2, {"base": 10}),
    ("spiral", 2, 64, 4, {}),
    ("spiral", 2, 48, 1, {"num_directions": 6, "base": 30}),
    ("spiral", 2, 24, 1, {"num_directions": 4}),
    ("nd", 1, 32, 2, {}),
    ("nd", 2, 48, 4, {}),
    ("nd", 3, 64, 3, {"base": 77}),
    ("mrope", 2, 48, 2, {}),
    ("mrope", 3, 64, 2, {"base": 500_000}),
    ("mrope-interleaved", 3, 64, 2, {}),
    ("mrope-interleaved", 2, 10, 1, {}),
    ("videorope", 1, 32, 1, {}),
    ("videorope", 3, 64, 2, {}),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    chromium = Chromium()
    yield chromium
    chromium.close()


@pytest.fixture
def page(browser: Chromium) -> Chromium:
    browser.open(PAGE)
    return browser


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def with_rotations(page: Chromium, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Let encodings draw the rotations that the page draws from a seed."""

    def drawn(count: int, num_axes: int) -> Tensor:
        return torch.tensor(page.run(f"randomRotations({count}, {num_axes}, {seed})"), dtype=torch.float64)

    monkeypatch.setattr("torchrope.encodings.mixed.random_rotations", drawn)
    monkeypatch.setattr("torchrope.encodings.simplex.random_rotations", drawn)


def scores_of(encoding: tr.Encoding, offset: list[float], size: int) -> Tensor:
    """The scores `(heads,)` of a query at the origin and a key at an offset in tokens, equal in all channels."""
    spacing = encoding.lattice.spaced(*[size] * encoding.num_axes)["spacing"]
    x = torch.ones(1, encoding.num_heads, 1, encoding.head_dim) / math.sqrt(encoding.head_dim)
    here = torch.zeros(1, encoding.num_axes)
    there = torch.tensor([offset]) * torch.as_tensor(spacing)
    with torch.no_grad():
        q, k = tr.rotate(x, x, encoding(here), key_rotation=encoding(there))
    return (q * k).sum(dim=(0, 2, 3))


@pytest.mark.parametrize(("name", "axes", "head_dim", "heads", "parameters"), CASES)
def test_numbers_are_those_of_the_library(
    page: Chromium,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    axes: int,
    head_dim: int,
    heads: int,
    parameters: dict[str, Any],
) -> None:
    size, seed = 14, 3
    with_rotations(page, monkeypatch, seed)
    encoding = parse_encoding(name).rotary(num_axes=axes, num_heads=heads, head_dim=head_dim, **parameters)
    shape = {"axes": axes, "heads": heads, "pairs": head_dim // 2, "size": size, "seed": seed} | parameters
    script = f"frequencies({name!r}, {shape})"
    shown = torch.tensor(page.run(script), dtype=torch.float64)  # (axes, heads or 1, pairs)
    spacing = torch.as_tensor(encoding.lattice.spaced(*[size] * axes)["spacing"]).reshape(-1, 1, 1)
    expected = encoding.frequencies_per_axis().detach() * spacing
    torch.testing.assert_close(shown.expand(axes, heads, -1), expected.expand(axes, heads, -1), atol=1e-7, rtol=1e-5)
    for offset in ([1.0, 0.0, 0.0], [0.0, 2.0, -3.0], [-17.0, 13.0, 5.0], [0.25, 40.5, 31.0], [55.0, -55.0, 55.0]):
        of_heads = [f"score(f, [{min(head, len(shown[0]) - 1)}], {offset[:axes]})" for head in range(heads)]
        scores = page.run(f"(() => {{ const f = {script}; return [{', '.join(of_heads)}]; }})()")
        assert scores == pytest.approx(scores_of(encoding, offset[:axes], size).tolist(), abs=1e-5)


def test_random_rotations_are_rotations_and_uniform(page: Chromium) -> None:
    for axes in (1, 2, 3):
        rotations = torch.tensor(page.run(f"randomRotations(4000, {axes}, 5)"), dtype=torch.float64)
        torch.testing.assert_close(rotations @ rotations.mT, torch.eye(axes).expand(4000, -1, -1))
        torch.testing.assert_close(torch.linalg.det(rotations), torch.ones(4000))
        if axes > 1:  # the first two moments of uniform rotations
            assert rotations.mean(dim=0).abs().max() < 0.05
            assert (rotations.square().mean(dim=0) - 1 / axes).abs().max() < 0.05
    assert page.run("randomRotations(1, 2, 1)") != page.run("randomRotations(1, 2, 2)")


def test_scores_of_a_lattice_are_those_of_its_offsets(page: Chromium) -> None:
    f = "frequencies('golden', { axes: 3, heads: 2, pairs: 8, size: 5 })"
    lattice = page.run(f"[...scores({f}, [0, 1], [[2], [-1, 0, 4], [-7, 3]])]")
    single = page.run(f"[-1, 0, 4].flatMap((a) => [-7, 3].map((b) => score({f}, [0, 1], [2, a, b])))")
    assert lattice == pytest.approx(single, abs=1e-12)
    assert page.run(f"score({f}, [0, 1], [0, 0, 0])") == pytest.approx(1, abs=1e-12)


def choose(page: Chromium, **values: Any) -> None:
    """Fill in controls as a reader does; `a_base` is the base of panel a."""
    for name, value in values.items():
        full = f"{name[0]}.{name[2:]}" if name.startswith(("a_", "b_")) else name
        control = f"document.getElementsByName('{full}')[0]"
        page.run(f"{control}.value = '{value}'; {control}.dispatchEvent(new Event('input', {{bubbles: true}}))")


def panel(page: Chromium, name: str, part: str) -> str:
    """The text of a part of panel a or b, with ASCII minus signs."""
    index = "ab".index(name)
    text: str = page.run(f"document.querySelectorAll('.panel')[{index}].querySelector('{part}').textContent")
    return text.replace("−", "-")


def shown_encoding(page: Chromium, name: str) -> tr.Encoding:
    """The encoding that a panel's line of Python builds."""
    encoding = eval(panel(page, name, ".python"), {"tr": tr})
    assert isinstance(encoding, tr.Encoding)
    return encoding


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_figures_and_tables_show_the_encodings_of_their_python(
    page: Chromium, monkeypatch: pytest.MonkeyPatch, axes: int
) -> None:
    with_rotations(page, monkeypatch, 7)
    choose(page, axes=axes, size=6, heads=2, head=2, seed=7, a_encoding="golden", a_max_frequency=9, b_encoding="nd")
    page.run("document.querySelector('.map').focus()")
    for key, code, times in (("ArrowDown", 40, 2), ("ArrowLeft", 37, 9), ("ArrowUp", 38, 1)):
        for _ in range(times):
            page.press(key, code)
    offset = [0, 1, -8][-axes:]
    for name in "ab":
        encoding = shown_encoding(page, name)
        score = scores_of(encoding, [float(value) for value in offset], 6)[1].item()
        printed = panel(page, name, "output")
        assert printed.startswith(f"offset ({', '.join(map(str, offset))}): score {score:.4f}"), printed
        assert printed.endswith(", beyond training")
        table = page.run(
            f"[...document.querySelectorAll('.panel')['ab'.indexOf('{name}')].querySelectorAll('.numbers tbody tr')]"
            ".map((row) => [...row.cells].map((cell) => Number(cell.textContent.replace('−', '-'))))"
        )
        spacing = torch.as_tensor(encoding.lattice.spaced(*[6] * axes)["spacing"]).reshape(-1, 1)
        expected = encoding.frequencies_per_axis().detach()[:, 1] * spacing
        torch.testing.assert_close(torch.tensor(table)[:, 1:-1].T, expected, atol=1e-7, rtol=1e-4)
        turns = 5 * expected.abs().sum(dim=0) / (2 * math.pi)
        torch.testing.assert_close(torch.tensor(table)[:, -1], turns, atol=0, rtol=1e-2)
        assert panel(page, name, ".slow").startswith(
            f"{(turns < 0.5).sum()} of {len(turns)} pairs make less than half a turn"
        )


@pytest.mark.parametrize("axes", [1, 2])
def test_offsets_that_come_back_are_the_highest_local_maxima_beyond_training(page: Chromium, axes: int) -> None:
    size, reach = 5, 9
    choose(page, axes=axes, size=size, factor=2, a_encoding="axial", a_base=30, head_dim=32)
    encoding = shown_encoding(page, "a")
    line = torch.arange(-reach, reach + 1.0)
    offsets = torch.cartesian_prod(*[line] * axes).reshape(-1, axes)
    scores = torch.stack([scores_of(encoding, offset, size)[0] for offset in offsets.tolist()])
    padded = scores.reshape(1, *[2 * reach + 1] * axes)
    pool = torch.nn.functional.max_pool1d if axes == 1 else torch.nn.functional.max_pool2d
    highest = pool(padded, 3, stride=1, padding=1).flatten()
    inside = (offsets.abs() < reach).all(dim=1)
    maximum = (scores > highest - 1e-9) & inside & (offsets.abs() >= size).any(dim=1)
    expected = scores[maximum].sort(descending=True).values[::2][:5]  # ±Δ are one
    rows = page.run("[...document.querySelectorAll('.panel')[0].querySelectorAll('.maxima tbody tr')].map((r) => "
                    "[...r.cells].map((c) => c.textContent.replaceAll('−', '-')))")  # fmt: skip
    assert len(rows) == len(expected) > 0
    for (offset, score), value in zip(rows, expected.tolist(), strict=True):
        assert float(score) == pytest.approx(value, abs=6e-4)
        place = [float(number) for number in offset.strip("()").split(",")]
        assert scores_of(encoding, place, size)[0].item() == pytest.approx(value, abs=1e-9)
        assert max(map(abs, place)) >= size


def test_map_has_the_signs_of_the_scores(page: Chromium) -> None:
    choose(page, axes=2, size=4, factor=2, a_encoding="axial", head_dim=16)
    encoding = shown_encoding(page, "a")
    pixels = page.run(
        """(async () => {
          const image = new Image(); image.src = document.querySelector('.map image').getAttribute('href');
          await image.decode();
          const context = Object.assign(document.createElement('canvas'), { width: 15, height: 15 }).getContext('2d');
          context.drawImage(image, 0, 0);
          return [...context.getImageData(0, 0, 15, 15).data];
        })()"""
    )
    rgba = torch.tensor(pixels).reshape(15, 15, 4)
    for row, column in ((0, 0), (7, 7), (3, 12), (14, 2), (7, 0)):
        score = scores_of(encoding, [row - 7.0, column - 7.0], 4)[0].item()
        assert rgba[row, column, 3].item() == pytest.approx(255 * abs(score) ** 0.6, abs=1.5)
        if abs(score) > 0.1:
            red, _, blue, _ = rgba[row, column].tolist()
            assert (blue > red) == (score > 0)


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("axial", {"axes": 3, "head_dim": 64}, {}),
        ("nd", {"axes": 2, "head_dim": 64}, {}),
        ("spiral", {"axes": 3, "head_dim": 48}, {}),
        ("spiral", {"axes": 2, "head_dim": 20}, {}),
        ("spiral", {"axes": 2, "head_dim": 48}, {"num_directions": 3}),
        ("golden", {"axes": 2, "head_dim": 48}, {"min_frequency": 30.5, "max_frequency": 2.5}),
    ],
)
def test_shapes_that_the_library_refuses_are_refused_in_its_words(
    page: Chromium, name: str, shape: dict[str, int], parameters: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=" must be ") as raised:
        parse_encoding(name).rotary(num_axes=shape["axes"], num_heads=6, head_dim=shape["head_dim"], **parameters)
    choose(page, a_encoding=name, **shape, **{f"a_{key}": value for key, value in parameters.items()})
    assert panel(page, "a", ".problem") == str(raised.value).partition(";")[0]
    assert not page.run("document.querySelector('.panel .results').checkVisibility()")
    choose(page, a_encoding="axial", axes=2, head_dim=48)
    assert panel(page, "a", ".problem") == ""
    assert page.problems == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"head_dim": 7}, "head_dim must be even and 2 to 256, got 7"),
        ({"size": 1}, "tokens per axis in training must be 2 to 2048, got 1"),
        ({"size": ""}, "tokens per axis in training must be 2 to 2048, got no whole number"),
        ({"size": 4.5}, "tokens per axis in training must be 2 to 2048, got 4.5"),
        ({"size": 65}, "tokens per axis must be 64 or less for a map, got 65"),
        ({"heads": 2, "head": 3}, "head shown must be 0 to 2, got 3"),
        ({"a_base": 1}, "base must be a number above 1, got 1"),
    ],
)
def test_numbers_out_of_range_are_refused(page: Chromium, values: dict[str, Any], message: str) -> None:
    choose(page, **values)
    assert panel(page, "a", ".problem") == message


def test_one_axis_may_be_as_long_as_text(page: Chromium) -> None:
    choose(page, axes=1, size=2048, a_encoding="axial", head_dim=128)
    page.run("document.querySelector('.map').focus()")
    page.press("ArrowRight", 39)
    encoding = shown_encoding(page, "a")
    assert panel(page, "a", "output") == f"offset (2): score {scores_of(encoding, [2.0], 2048)[0].item():.4f}"
    rows = page.run("document.querySelector('.maxima tbody').rows.length")
    assert rows == 5
    assert page.run("document.querySelector('.curves polyline').points.numberOfItems") == 4 * 2048
    assert page.problems == []


def test_two_encodings_share_the_offset_of_the_pointer(page: Chromium) -> None:
    box = page.run("(({ x, y, width, height }) => [x, y, width, height])(document.querySelector('.map image')"
                   ".getBoundingClientRect())")  # fmt: skip
    page.point_at(box[0] + 0.75 * box[2], box[1] + 0.25 * box[3])
    first, second = (panel(page, name, "output") for name in "ab")
    row, column = (int(value) for value in re.findall(r"-?\d+", first)[:2])
    assert -30 < row < -25
    assert 25 < column < 30
    assert second.startswith(f"offset ({row}, {column}): score")
    assert first != second


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_page_works_from_a_disk_in_both_modes_and_widths(browser: Chromium, width: int, dark: bool) -> None:
    browser.open(PAGE, width=width, dark=dark)
    assert browser.problems == []
    assert browser.requests == [PAGE.with_suffix(".js").as_uri()]
    for axes in (1, 2, 3):
        choose(browser, axes=axes, head=0)
        assert browser.run("document.documentElement.scrollWidth") <= width
    luminance = browser.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(luminance) < 60) == dark
    browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_controls_have_labels_and_figures_have_titles(page: Chromium) -> None:
    controls = "[...document.querySelectorAll('input, select')]"
    assert page.run(f"{controls}.length") >= 12
    assert page.run(f"{controls}.filter((control) => !control.labels.length).length") == 0
    assert page.run("[...document.querySelectorAll('svg')].every((svg) => svg.querySelector('title')?.textContent)")
    assert page.run("[...document.querySelectorAll('.map')].every((map) => map.tabIndex === 0)")
    page.run("document.querySelector('select').focus()")
    for _ in range(20):
        page.press("Tab", 9)
        if page.run("document.activeElement.classList.contains('map')"):
            break
    else:
        pytest.fail("the map cannot be reached by the keyboard")


def test_readme_and_first_page_link_to_it() -> None:
    root = PAGE.parents[1]
    first_screen = "\n".join((root / "README.md").read_text(encoding="utf-8").splitlines()[:30])
    assert "](docs/explore.html)" in first_screen
    assert "](explore.html)" in (root / "docs/index.md").read_text(encoding="utf-8")
