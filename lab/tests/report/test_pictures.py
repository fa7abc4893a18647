"""Pictures of predictions: drawn by the studies, on the page, as files, and read from untrusted JSON."""

import base64
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor
from test_page import HOSTILE, Tags, curves, result, save

from torchrope_lab.engine.drawings import (
    BOXES_SIDE,
    LARGEST,
    MAP_ALPHA,
    box_overlay,
    colour,
    legend,
    map_overlay,
    picture,
)
from torchrope_lab.report.page import write_report
from torchrope_lab.report.pictures import sheet
from torchrope_lab.results import Pictures

SVG = "{http://www.w3.org/2000/svg}"
CLASSES = [f"class {index}" for index in range(12)]
NAMES = ("truth", "axial", "mixed", "liere:8", "learned")


def image(height=20, width=30, channels=1):
    return torch.rand(channels, height, width, generator=torch.Generator().manual_seed(0))


def stripes(classes=3, height=20, width=30):
    """A map of vertical stripes with nothing above."""
    labels = (torch.arange(width) * classes // width).expand(height, width).clone()
    labels[: height // 2] = 255
    return labels


def maps(classes=CLASSES, names=NAMES[:2], title="20 × 30"):
    overlay = map_overlay(stripes(), nothing=(255,))
    row = picture(title, image(), dict.fromkeys(names, overlay.png))
    caption = "Colours are classes."
    return Pictures("maps", "Predicted maps", "Stripes.", [row], caption, legend(classes, [overlay]))


def boxes(classes=CLASSES, names=NAMES, title="20 × 30"):
    edges, labels = torch.tensor([[2.0, 3, 12, 9], [10, 5, 30, 20]]), torch.tensor([1, 11])
    truth = box_overlay((20, 30), edges, labels)
    predicted = box_overlay((20, 30), edges, labels, torch.tensor([0.9, 0.25]))
    panels = {name: (truth if index == 0 else predicted).png for index, name in enumerate(names)}
    rows = [picture(title, image(), panels), picture("in colour", image(channels=3), panels)]
    return Pictures("boxes", "Predicted boxes", "Two boxes.", rows, legend=legend(classes, [truth, predicted]))


def shown(*pictures, **changes):
    found = result("dense", "scenes", [curves()], **changes)
    return replace(found, findings=replace(found.findings, pictures=pictures))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_report(save(tmp_path_factory.mktemp("pictures"), shown(maps(), boxes())))


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory):
    classes = [HOSTILE, "W" * 3000, *CLASSES[2:]]
    names = [HOSTILE, *(f"{HOSTILE}{index}" for index in range(8))]
    drawn = [replace(build(classes, names, HOSTILE), title=HOSTILE, alt=HOSTILE, caption=HOSTILE) for build in (maps, boxes)]  # fmt: skip  # noqa: E501
    return write_report(save(tmp_path_factory.mktemp("hostile"), shown(*drawn)))


def pixels(text):
    return np.array(Image.open(BytesIO(base64.b64decode(text))))


def test_image_is_kept_as_png():
    kept = picture("t", 5 * image() - 2, {})
    expected = image()[0].sub(image().min()).div(image().max() - image().min()).mul(255).round()
    assert kept.size == (30, 20)
    assert np.abs(pixels(kept.image).astype(float) - expected.numpy()).max() <= 1
    assert pixels(picture("t", image(channels=3), {}).image).shape == (20, 30, 3)
    assert pixels(picture("t", torch.zeros(1, 4, 4), {}).image).max() == 0


def test_large_images_become_small_with_all_that_is_on_them():
    kept = picture("t", image(300, 2 * LARGEST), {})
    assert max(kept.size) == LARGEST
    half = torch.zeros(300, 2 * LARGEST, dtype=torch.long)
    half[:, LARGEST:] = 1
    overlay = pixels(map_overlay(half).png)
    assert overlay.shape[:2] == kept.size[::-1]
    left, right = overlay[:, : LARGEST // 2, :3], overlay[:, LARGEST // 2 :, :3]
    assert (left == ImageColor.getrgb(colour(0))).all()
    assert (right == ImageColor.getrgb(colour(1))).all()


def test_map_is_drawn_pixel_for_pixel():
    labels = torch.randint(0, 4, (9, 14), generator=torch.Generator().manual_seed(1))
    overlay = map_overlay(labels, nothing=(0,))
    drawn = pixels(overlay.png)
    assert overlay.classes == [1, 2, 3]
    assert (drawn[..., 3] == np.where(labels == 0, 0, MAP_ALPHA)).all()
    for index in (1, 2, 3):
        assert (drawn[labels == index, :3] == ImageColor.getrgb(colour(index))).all()


def test_boxes_are_outlined_where_they_are():
    overlay = box_overlay((20, 30), torch.tensor([[3.0, 3, 12, 9], [15, 6, 27, 18]]), torch.tensor([1, 11]))
    drawn = pixels(overlay.png)
    assert overlay.classes == [1, 11]
    assert drawn.shape == (round(BOXES_SIDE * 20 / 30), BOXES_SIDE, 4)
    scale = BOXES_SIDE / 30
    for index, edges in ((1, (3, 3, 12, 9)), (11, (15, 6, 27, 18))):
        rows, columns = np.nonzero((drawn[..., :3] == ImageColor.getrgb(colour(index))).all(-1) & (drawn[..., 3] > 0))
        outline = [columns.min(), rows.min(), columns.max(), rows.max()]
        assert outline == pytest.approx([scale * edge for edge in edges], abs=1)
        left, top, right, bottom = outline
        assert not drawn[top + 5 : bottom - 4, left + 5 : right - 4].any()


def test_scores_are_written_into_their_boxes():
    edges, labels = torch.tensor([[0.0, 0, 30, 20]]), torch.tensor([0])
    without = pixels(box_overlay((20, 30), edges, labels).png)
    drawn = {score: pixels(box_overlay((20, 30), edges, labels, torch.tensor([score])).png) for score in (0.9, 0.25)}
    corner = np.s_[2:30, 2:40]
    assert (drawn[0.9][corner] != without[corner]).any()
    assert (drawn[0.9][corner] != drawn[0.25][corner]).any()
    drawn[0.9][corner] = without[corner]
    assert (drawn[0.9] == without).all()


def test_legend_has_the_drawn_classes_in_different_colours():
    many = map_overlay(torch.arange(12).repeat_interleave(5).expand(10, 60))
    assert list(legend(CLASSES, [many])) == CLASSES
    assert len({colour(index) for index in range(150)}) == 150
    assert list(maps().legend) == CLASSES[:3]
    drawn = ElementTree.fromstring(sheet(maps(), "m"))
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert texts == ["20 × 30", "truth", "axial", *CLASSES[:3]]
    fills = [rect.get("fill") for rect in drawn.iter(f"{SVG}rect")]
    assert fills[1:] == [colour(index) for index in range(3)]


def test_sheet_has_every_overlay_on_its_image():
    drawn = ElementTree.fromstring(sheet(boxes(), "b"))
    panels = [node for node in drawn.iter(f"{SVG}g") if node.find(f"{SVG}use") is not None]
    rows = boxes().rows
    assert len(panels) == len(rows) * len(NAMES)
    images = {f"#{node.get('id')}": node.get("href").partition(",")[2] for node in drawn.iter(f"{SVG}image")}
    expected = [(row.image, overlay) for row in rows for overlay in row.panels.values()]
    for panel, (photograph, overlay) in zip(panels, expected, strict=True):
        assert images[panel.find(f"{SVG}use").get("href")] == photograph
        assert panel.find(f"{SVG}image").get("href").partition(",")[2] == overlay
        assert float(panel.find(f"{SVG}image").get("width")) == 256


def test_rows_of_one_panel_are_side_by_side_below_lines_of_text():
    rows = [picture(title, image(10, 40), {"mixed: up\nlearned: down": ""}) for title in ("up", "down")]
    drawn = ElementTree.fromstring(sheet(Pictures("p", "t", "a", rows), "p"))
    texts = [(text.text, float(text.get("x")), float(text.get("y"))) for text in drawn.iter(f"{SVG}text")]
    written = [("mixed: up", 34), ("learned: down", 54)]
    assert texts == [(text, x, y) for title, x in (("up", 0), ("down", 270)) for text, y in [(title, 14), *written]]
    assert (drawn.get("width"), float(drawn.get("height")) < 160) == ("526", True)


NOTHING = map_overlay(torch.zeros(4, 4).long(), nothing=(0,)).png


@pytest.mark.parametrize(
    "pictures",
    [
        Pictures("p", "t", "a", []),
        Pictures("p", "t", "a", [picture("t", image(), {})]),
        Pictures("p", "t", "a", [picture("t", image(), {"truth": "", "axial": NOTHING})]),
        Pictures("p", "t", "a", [picture("t", image(1, 1), {"x": map_overlay(torch.zeros(1, 1).long()).png})]),
        Pictures("p", "t", "a", [picture("t", image(3, 200), {"x": box_overlay((3, 200), torch.tensor([[9.0, 2, 1, 1]]),
                                                                                torch.tensor([0])).png})]),
        Pictures("p", "t", "a", [picture("t", image(), {"x": box_overlay((20, 30), torch.zeros(0, 4),
                                                                          torch.zeros(0).long()).png})]),
    ],
    ids=["nothing", "no panel", "nothing drawn", "one pixel", "wide, and a box that is none", "no box"],
)  # fmt: skip
def test_any_pictures_are_drawn(pictures):
    text = sheet(pictures, "p")
    ElementTree.fromstring(text)
    assert "nan" not in re.sub(r"base64,[^\"]*", "", text).lower()
    assert 'width="-' not in text


def test_page_and_markdown_show_pictures_and_their_files(page):
    tags = Tags(page.read_text(encoding="utf-8"))
    markdown = (page.parent / "report.md").read_text(encoding="utf-8")
    for text in ("Predicted maps", "Predicted boxes", "Colours are classes."):
        assert text in tags.text
        assert text in markdown
    assert "![Stripes.](figures/dense-scenes-maps.svg)" in markdown
    labelled = [attributes.get("aria-label") for attributes in tags.of("div") if attributes.get("role") == "img"]
    assert labelled[1:] == ["Stripes.", "Two boxes."]
    assert len(tags.ids) == len(set(tags.ids))
    for name in ("maps", "boxes"):
        drawn = ElementTree.parse(page.parent / "figures" / f"dense-scenes-{name}.svg")
        hrefs = [image.get("href") for image in drawn.iter(f"{SVG}image")]
        assert hrefs
        assert all(re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/=]+", href) for href in hrefs)


def test_hostile_names_are_escaped(hostile_page):
    tags = Tags(hostile_page.read_text(encoding="utf-8"))
    assert not [name for _, attributes in tags.found for name in attributes if name.startswith("on")]
    assert not tags.of("img")
    for file in (hostile_page.parent / "figures").glob("*.svg"):
        tree = ElementTree.parse(file)
        assert not [node for node in tree.iter() if node.tag.rpartition("}")[2] in ("script", "img", "a")]


@pytest.mark.slow
class TestInChromium:
    """What readers see."""

    @pytest.mark.parametrize("width", [360, 1280])
    @pytest.mark.parametrize("which", ["page", "hostile_page"])
    def test_pictures_are_loaded_and_scroll_by_themselves(self, browser, request, which, width):
        browser.open(request.getfixturevalue(which), width)
        browser.draw_all()
        assert (browser.problems, browser.requests) == ([], [])
        assert browser.run("typeof window.hacked") == "undefined"
        assert browser.run("document.documentElement.scrollWidth") <= width
        sides = browser.run("[...document.querySelectorAll('.shots use')].map(u => u.getBoundingClientRect().width)")
        assert sides == pytest.approx([256] * len(sides), abs=1)
        scrolls = "[...document.querySelectorAll('.shots .drawing')].map(d => d.scrollWidth > d.clientWidth)"
        assert any(browser.run(scrolls)) == (width == 360)
        assert browser.run("[...document.querySelectorAll('.shots .drawing')].every(d => d.tabIndex === 0)")

    def test_dark_paper_has_light_names(self, browser, page):
        def ink(dark):
            browser.open(page, dark=dark)
            return browser.run("getComputedStyle(document.querySelector('.shots svg > g > text')).fill")

        assert ink(False) != ink(True)

    def test_picture_is_downloaded_as_it_is_drawn(self, browser, page, tmp_path):
        browser.open(page)
        browser.draw_all()
        browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        browser.run("document.querySelector('#dense-scenes-maps .tools button').click()")
        file = tmp_path / "dense-scenes-maps.svg"
        browser.until(file.exists)
        saved, drawn = (
            ElementTree.parse(each / "dense-scenes-maps.svg") for each in (tmp_path, page.parent / "figures")
        )
        assert [node.tag for node in saved.iter()] == [node.tag for node in drawn.iter()]

    def test_pictures_are_shown_without_scripts(self, browser, page):
        browser.open(page, scripts=False)
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
        count = len(maps().rows) * (1 + 2) + len(boxes().rows) * (1 + len(NAMES))
        assert browser.run("document.querySelectorAll('.shots svg image').length") == count
