"""Pictures of predictions: on the page, as files, and read from untrusted JSON."""

import base64
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from chromium import BINARY, Chromium
from PIL import Image
from test_page import HOSTILE, Tags, curves, result, save

from torchrope_lab.report.page import write_report
from torchrope_lab.report.pictures import sheet
from torchrope_lab.results import Box, Panel, Pictures, runs
from torchrope_lab.studies.engine.pictures import LARGEST, box_panel, map_panel, picture

SVG = "{http://www.w3.org/2000/svg}"
CLASSES = [f"class {index}" for index in range(12)]


def image(height=20, width=30, channels=1):
    return torch.rand(channels, height, width, generator=torch.Generator().manual_seed(0))


def regions(classes=3, height=20, width=30):
    """A map of vertical stripes with nothing above."""
    labels = (torch.arange(width) * classes // width).expand(height, width).clone()
    labels[: height // 2] = 255
    return labels


def maps(classes=CLASSES, labels=None, names=("truth", "axial")):
    labels = regions() if labels is None else labels
    rows = [picture("20 × 30", image(), [map_panel(name, labels, nothing=(255,)) for name in names])]
    return Pictures("maps", "Predicted maps", "Stripes of three classes.", classes, rows, "Colours are classes.")


def boxes(classes=CLASSES, names=("truth", "axial", "mixed", "liere:8", "learned")):
    edges, labels = torch.tensor([[2.0, 3, 12, 9], [10, 5, 30, 20]]), torch.tensor([1, 11])
    panels = [
        box_panel(name, (20, 30), edges, labels, None if index == 0 else torch.tensor([0.9, 0.25]))
        for index, name in enumerate(names)
    ]
    rows = [picture("20 × 30", image(), panels), picture("in colour", image(channels=3), panels)]
    return Pictures("boxes", "Predicted boxes", "Two boxes.", classes, rows)


def shown(*pictures, **changes):
    found = result("dense", "scenes", [curves()], **changes)
    return replace(found, findings=replace(found.findings, pictures=pictures))


def plain(pictures):
    return json.loads(json.dumps(shown(pictures).plain()))["findings"]["pictures"][0]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_report(save(tmp_path_factory.mktemp("pictures"), shown(maps(), boxes())))


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory):
    names = [HOSTILE, "W" * 3000, *CLASSES[2:]]
    told = [replace(each(names, names=[HOSTILE] * 9), title=HOSTILE, alt=HOSTILE, caption=HOSTILE) for each in (maps, boxes)]  # fmt: skip  # noqa: E501
    told = [replace(each, rows=[replace(row, title=HOSTILE) for row in each.rows]) for each in told]
    return write_report(save(tmp_path_factory.mktemp("hostile"), shown(*told)))


def pixels(text):
    return np.asarray(Image.open(BytesIO(base64.b64decode(text))))


def test_image_is_kept_as_png():
    kept = picture("t", 5 * image() - 2, [])
    expected = image()[0].sub(image().min()).div(image().max() - image().min()).mul(255).round()
    assert (kept.width, kept.height) == (30, 20)
    assert np.abs(pixels(kept.image).astype(float) - expected.numpy()).max() <= 1
    assert pixels(picture("t", image(channels=3), []).image).shape == (20, 30, 3)
    assert pixels(picture("t", torch.zeros(1, 4, 4), []).image).max() == 0


def test_large_images_become_small_with_all_that_is_on_them():
    kept = picture("t", image(300, 2 * LARGEST), [])
    assert max(kept.width, kept.height) == LARGEST == pixels(kept.image).shape[1]
    half = torch.zeros(300, 2 * LARGEST, dtype=torch.long)
    half[:, LARGEST:] = 1
    covered = dict.fromkeys((0, 1), 0)
    for kind, length in runs(map_panel("truth", half).map):
        covered[kind] += length
    assert covered[0] == covered[1] == kept.width * kept.height / 2
    [box] = box_panel("truth", (300, 2 * LARGEST), torch.tensor([[0.0, 40, 100, 300]]), torch.tensor([0])).boxes
    assert box.bottom == pytest.approx(kept.height)
    assert box.right == pytest.approx(50, rel=0.01)


def test_map_is_drawn_pixel_for_pixel():
    labels = torch.randint(0, 4, (9, 14), generator=torch.Generator().manual_seed(1))
    row = picture("t", image(9, 14), [map_panel("truth", labels, nothing=(0,))])
    drawn = ElementTree.fromstring(sheet(plain(Pictures("p", "t", "a", CLASSES, [row])), "p"))
    scale = 256 / 14
    painted = torch.zeros_like(labels)
    for path in drawn.iter(f"{SVG}path"):
        name = path.find(f"{SVG}title").text
        for x, y, wide, high in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z", path.get("d")):
            edges = [float(edge) / scale for edge in (x, y, float(x) + float(wide), float(y) + float(high))]
            left, top, right, bottom = map(round, edges)
            assert edges == pytest.approx([left, top, right, bottom], abs=0.01)
            assert bottom == top + 1
            assert not painted[top, left:right].any()
            painted[top, left:right] = CLASSES.index(name)
    assert torch.equal(painted, labels)


def test_large_regions_are_labelled_once():
    labels = torch.zeros(32, 32, dtype=torch.long)
    labels[2:12, 2:6] = labels[8:12, 2:12] = labels[2:12, 10:12] = 3  # a U is one region
    labels[20:30, 4:14] = 3  # below it, and apart
    labels[0, 31] = 3
    row = picture("t", image(32, 32), [map_panel("truth", labels, nothing=(0,))])
    drawn = ElementTree.fromstring(sheet(plain(Pictures("p", "t", "a", CLASSES, [row])), "p"))
    over = [text.text for text in drawn.iter(f"{SVG}text") if text.get("paint-order")]
    assert over == ["class 3", "class 3"]


def test_boxes_stand_where_they_are_with_names_and_scores():
    drawn = ElementTree.fromstring(sheet(plain(boxes()), "b"))
    panels = [node for node in drawn.iter(f"{SVG}svg") if node.find(f"{SVG}use") is not None]
    assert len(panels) == 10
    frames = [rect for rect in panels[1].iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert [frame.find(f"{SVG}title").text for frame in frames] == ["class 1, 90 %", "class 11, 25 %"]
    scale = 256 / 30
    for frame, box in zip(frames, ([2, 3, 10, 6], [10, 5, 20, 15]), strict=True):
        at = [float(frame.get(key)) for key in ("x", "y", "width", "height")]
        assert at == pytest.approx([scale * value for value in box], abs=0.01)
    assert [text.text for text in panels[0].iter(f"{SVG}text")] == ["class 1", "class 11"]
    assert [text.text for text in panels[1].iter(f"{SVG}text")] == ["class 1 90", "class 11 25"]


def test_legend_has_the_visible_classes_in_different_colours():
    many = torch.arange(12).repeat_interleave(5).expand(10, 60)
    row = picture("t", image(10, 60), [map_panel("truth", many)])
    drawn = ElementTree.fromstring(sheet(plain(Pictures("p", "t", "a", CLASSES, [row])), "p"))
    texts = [text.text for text in drawn.iter(f"{SVG}text") if not text.get("paint-order")]
    assert texts == ["t", "truth", *CLASSES]
    fills = [path.get("fill") for path in drawn.iter(f"{SVG}path")]
    assert len(set(fills)) == 12
    hatches = {f"url(#{pattern.get('id')})" for pattern in drawn.iter(f"{SVG}pattern")}
    assert {fill for fill in fills if fill.startswith("url")} == hatches
    few = sheet(plain(maps()), "m")
    assert "class 3" not in few


@pytest.mark.parametrize(
    "pictures",
    [
        Pictures("p", "t", "a", [], []),
        Pictures("p", "t", "a", [], [picture("t", image(), [])]),
        Pictures("p", "t", "a", CLASSES, [picture("t", image(), [Panel("truth"), Panel("axial")])]),
        Pictures("p", "t", "a", CLASSES, [picture("t", image(1, 1), [map_panel("x", torch.zeros(1, 1).long())])]),
        Pictures("p", "t", "a", CLASSES, [picture("t", image(3, 200), [Panel("x", [Box(9.0, 2.0, 1.0, 1.0, 0)])])]),
    ],
    ids=["nothing", "no panel", "nothing found", "one pixel", "wide, and a box that is none"],
)
def test_any_pictures_are_drawn(pictures):
    text = sheet(plain(pictures), "p")
    ElementTree.fromstring(text)
    assert "nan" not in text.lower()
    assert 'width="-' not in text


def test_page_and_markdown_show_pictures_and_their_files(page):
    tags = Tags(page.read_text(encoding="utf-8"))
    markdown = (page.parent / "report.md").read_text(encoding="utf-8")
    for text in ("Predicted maps", "Predicted boxes", "Colours are classes."):
        assert text in tags.text
        assert text in markdown
    assert "![Stripes of three classes.](figures/dense-scenes-maps.svg)" in markdown
    labelled = [attributes.get("aria-label") for attributes in tags.of("div") if attributes.get("role") == "img"]
    assert labelled[1:] == ["Stripes of three classes.", "Two boxes."]
    ids = [attributes["id"] for _, attributes in tags.found if "id" in attributes]
    assert len(ids) == len(set(ids))
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


def test_results_from_before_pictures_are_still_read(tmp_path):
    save(tmp_path, shown(maps()))
    [file] = tmp_path.glob("*.json")
    old = json.loads(file.read_text())
    del old["findings"]["pictures"]
    file.write_text(json.dumps(old))
    page = write_report(tmp_path)
    assert 'class="shots"' not in page.read_text()


def spoil(change):
    def changed(found):
        pictures = found["findings"]["pictures"][0]
        change(pictures, pictures["rows"][0], pictures["rows"][0]["panels"][0])

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil(lambda p, r, o: r.update(image="x\" onload=\"alert(1)")), "rows[0]: image must be PNG in base64, got"),
        (spoil(lambda p, r, o: r.update(image="R0lGODlhAQABAAAAACw=")), "image must be PNG in base64, got 'R0lGO"),
        (spoil(lambda p, r, o: r.update(width=0)), "rows[0]: width must be 1 to 4096 pixels, got 0"),
        (spoil(lambda p, r, o: r.update(height=10**9)), "rows[0]: height must be 1 to 4096 pixels"),
        (spoil(lambda p, r, o: o.update(map="0:7")), "a map must cover 600 pixels, got 7"),
        (spoil(lambda p, r, o: o.update(map="0:600 x")), "a map must be runs class:length, got 'x'"),
        (spoil(lambda p, r, o: o.update(map="0:0")), "a map must be runs class:length, got '0:0'"),
        (spoil(lambda p, r, o: o.update(map="0:99999999999999")), "a map must be runs class:length"),
        (spoil(lambda p, r, o: o.update(map="-1:600")), "a map must be runs class:length, got '-1:600'"),
        (spoil(lambda p, r, o: o.update(map="12:600")), "must be of 12 classes, got class 12"),
        (spoil(lambda p, r, o: o.update(boxes=[{"left": 1}])), "panels[0].boxes[0] must have 'top'"),
        (spoil(lambda p, r, o: o.update(boxes=[dict.fromkeys(("left", "top", "right", "bottom"), 1.5) | {"kind": -1}])),
         "must be of 12 classes, got class -1"),
        (spoil(lambda p, r, o: p.update(name="curves")), "must have different names, got ['curves', 'curves']"),
        (spoil(lambda p, r, o: p.pop("alt")), "pictures[0] must have 'alt'"),
    ],
)  # fmt: skip
def test_damaged_pictures_are_refused_in_one_line(tmp_path, change, message):
    found = shown(maps()).plain()
    change(found)
    (tmp_path / "dense-scenes.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        write_report(tmp_path)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "report").exists()


def test_results_refuse_boxes_of_classes_that_are_not_there():
    row = picture("t", torch.zeros(3, 1, 1), [Panel("truth", [Box(0.0, 0.0, 1.0, 1.0, 3)])])
    with pytest.raises(ValueError, match="boxes and maps of 'p' must be of 2 classes, got class 3"):
        Pictures("p", "t", "a", ["a", "b"], [row])


@pytest.fixture(scope="module")
def browser():
    if BINARY is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium)")
    chromium = Chromium()
    yield chromium
    chromium.close()


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

    def test_dark_paper_has_light_names_and_pictures_as_they_are(self, browser, page):
        def colours(dark):
            browser.open(page, dark=dark)
            ink = "getComputedStyle(document.querySelector('.shots svg > g > text')).fill"
            over = "getComputedStyle(document.querySelector('.shots [paint-order]')).fill"
            return browser.run(f"[{ink}, {over}]")

        (light, over), (dark, same) = colours(False), colours(True)
        assert light != dark
        assert over == same == "rgb(0, 0, 0)"

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
        assert browser.run("document.querySelectorAll('.shots svg image').length") == 3
