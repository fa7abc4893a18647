"""The report: contents, figures, damaged files, and its behaviour in a browser."""

import json
import math
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from torchrope_lab import report
from torchrope_lab.report import looks, plots, tables
from torchrope_lab.report import page as page_module
from torchrope_lab.report.page import write_report
from torchrope_lab.report.tables import written
from torchrope_lab.results import (
    Axis,
    Column,
    DataFacts,
    Figure,
    Findings,
    RunFacts,
    StudyResult,
    Table,
)

ENCODINGS = ("none", "learned", "axial", "mixed", "liere:8", "liere", "comrope-ld")
SERIES = {"series": "name", "low": "low", "high": "high"}
TOP1 = Axis("top1", "Top-1", "%")


def about(top1):
    return {"top1": top1, "low": top1 - 2.5, "high": top1 + 2}


def scores():
    columns = [
        Column("encoding", "Encoding"),
        Column("name", "Name"),
        Column("top1", "Top-1", "%", 1, low="low", high="high"),
        Column("parameters", "Parameters", digits=0),
        Column("gap", "Behind the best", "points", 1),
    ]
    rows = [
        {"encoding": f"Called {name}", "name": name, **about(90.0 - 7 * index % 30), "parameters": 9 * 10**index,
         "gap": None if index == 2 else 0.5 * index}
        for index, name in enumerate(ENCODINGS)
    ]  # fmt: skip
    return Table("Top-1 on the validation set", columns, rows, note="Intervals are bootstrapped.")


def published():
    columns = [Column("name", "Encoding"), Column("value", "CIFAR-100", "%", 1, low="low", high="high")]
    rows = [{"name": "absolute", "value": 63.9, "low": 62.9, "high": 65.8}]
    return Table("Top-1 in the paper", columns, rows, source="A paper, table 1", note="64.8 may be meant.")


def curves(**changes):
    rows = [
        {"name": name, "epoch": epoch, **about(90 - 5 * index - 50 * math.exp(-epoch / 4))}
        for index, name in enumerate(ENCODINGS)
        for epoch in range(1, 8)
    ]
    given = {"name": "curves", "kind": "lines", "title": "Top-1 while training", "alt": "Lines that rise.",
             "x": Axis("epoch", "Epoch"), "y": TOP1, "rows": rows, "caption": "Bands are intervals."}  # fmt: skip
    return Figure(**{**given, **SERIES, **changes})


def points():
    rows = [{"name": name, **about(90.0 - 7 * index % 30)} for index, name in enumerate(ENCODINGS)]
    return Figure("top1", "points", "Top-1", "Points in a row.", TOP1, Axis("name", "Encoding", scale="category"), rows,
                  **SERIES)  # fmt: skip


def panels():
    rows = [
        {"stage": stage, "name": name, "size": 2**power, **about(80 - 5 * index - power)}
        for stage in ("one stage", "two stages")
        for index, name in enumerate(("mixed", "liere"))
        for power in range(3, 7)
    ]
    size = Axis("size", "Input", "px", scale="log")
    return Figure("sizes", "lines", "Other sizes", "Lines that fall.", size, TOP1, rows, panel="stage", **SERIES)


def bars():
    rows = [
        {"name": name, "shared": shared, **about(70 + 4 * index)}
        for index, name in enumerate(("liere", "comrope-ld"))
        for shared in ("heads", "layers", "neither")
    ]
    shared = Axis("shared", "Shared across", scale="category")
    return Figure("sharing", "bars", "Sharing", "Bars of a height.", shared, TOP1, rows, **SERIES)


def tall_bars():
    rows = [{"family": name, "count": 10**power} for power, name in enumerate(("a few", "many", "most"), start=2)]
    family = Axis("family", "Family", scale="category")
    count = Axis("count", "Parameters", scale="log")
    return Figure("parameters", "bars", "Parameters", "Bars that grow.", count, family, rows)


def cells():
    rows = [
        {"head": f"head {head}", "x": x, "y": y, "score": math.cos((head + 1) * x / 2) * math.cos(y / 2)}
        for head in range(2)
        for x in range(-4, 5)
        for y in range(-4, 5)
    ]
    x, y = Axis("x", "Offset in width", "tokens"), Axis("y", "Offset in height", "tokens")
    colour = Axis("score", "Score")
    return Figure("probes", "cells", "Scores", "Waves.", x, y, rows, panel="head", colour=colour)


def result(study="accuracy", data="digits", figures=(), **changes):
    found = Findings(
        answer="mixed is significantly the best with 90.0 % [87.5, 92.0].",
        tables=[scores()],
        figures=figures,
        published=[published()],
    )
    described = {"name": data, "title": f"data called {data}", "description": "Pictures.", "axes": ["height", "width"],
                 "input_size": [8, 8], "num_classes": 10, "train": 1437, "val": 360, "chance": 0.1}  # fmt: skip
    run = {"command": f"torchrope study {study} --data {data}", "date": "2026-11-21", "commit": "abc1234",
           "torchrope": "0.2.0", "versions": {"torch": "2.14.1"}, "machine": {"cpu": "Fake CPU", "cores": 2},
           "config": {"encodings": list(ENCODINGS), "seeds": 2}}  # fmt: skip
    given = StudyResult(
        study=study, title=study.title(), question=f"What about {study}?", sources=["A paper, table 1"], findings=found,
        data=DataFacts(**described) if data else None, run=RunFacts(**run), left_out=["ComRoPE was left out."],
    )  # fmt: skip
    return replace(given, **changes)


def save(folder, *results):
    folder.mkdir(exist_ok=True)
    for each in results:
        data = f"-{each.data.name}" if each.data else ""
        (folder / re.sub(r"[^\w.-]", "_", f"{each.study}{data}.json")[-80:]).write_text(json.dumps(each.plain()))
    return folder


def all_kinds():
    return [
        result("probes", None, [cells()]),
        result("sharing", "digits", [bars(), tall_bars()]),
        result("resolution", "digits", [panels()]),
        result("accuracy", "motion", [points(), curves()]),
        result("accuracy", "digits", [points(), curves()]),
        result("compare"),
    ]


RTL = "\u202egnp.exe"
HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\"'`|$a_b$ &amp; "
    "{{7*7}} [x](javascript:alert(1)) __proto__ " + RTL
)


def hostile():
    """A study in which every word that can be is out to do harm, and some are very long."""
    long = "W" * 1000 + HOSTILE
    rows = [{"k" + HOSTILE: name, "x.y['z']": index, "low": index - 1, "high": index + 1, "constructor": HOSTILE}
            for index, name in enumerate([HOSTILE, long, "=1+1", "@sum", "datum.toString()", "mixed"])]  # fmt: skip
    key = "k" + HOSTILE
    drawn = {"title": HOSTILE, "alt": HOSTILE, "caption": HOSTILE, "rows": rows, "low": "low", "high": "high"}
    y = Axis("x.y['z']", HOSTILE, HOSTILE)
    figures = [
        Figure(name=HOSTILE, kind="points", x=y, y=Axis(key, long, scale="category"), series=key, **drawn),
        Figure(name=HOSTILE + "2", kind="lines", x=Axis("x.y['z']", long), y=y, series=key, panel=key, **drawn),
        Figure(name="__proto__", kind="bars", x=Axis(key, HOSTILE, scale="category"), y=y, **drawn),
        Figure(name="c", kind="cells", x=Axis(key, long, scale="category"), y=y, colour=y,
               **{**drawn, "low": None, "high": None}),
    ]  # fmt: skip
    column = Column(key, HOSTILE, HOSTILE)
    table = Table(HOSTILE, [column, Column("x.y['z']", long, "", 1)], rows, source=HOSTILE, note=HOSTILE)
    found = Findings(HOSTILE, [table], figures, [table])
    good = result()
    named = {"name": f"../../{HOSTILE}", "title": HOSTILE, "description": long}
    data = replace(good.data, **named, skipped=[HOSTILE], unread=HOSTILE)
    run = replace(good.run, command=HOSTILE, config={HOSTILE: HOSTILE}, versions={HOSTILE: HOSTILE})
    return StudyResult(f"../{HOSTILE}", HOSTILE, HOSTILE, [HOSTILE], found, data, run, left_out=[HOSTILE, long])


FIRST_MARK = """(() => {
    const box = document.querySelector('figure .live .mark-symbol path').getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
})()"""


TOOLTIP = "document.getElementById('vg-tooltip-element')"
TOOLTIP_SHOWN = f"{TOOLTIP} !== null && getComputedStyle({TOOLTIP}).visibility === 'visible'"


class Tags(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, html):
        super().__init__()
        self.found, self.words = [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.words.append(data)

    def of(self, tag):
        return [attributes for name, attributes in self.found if name == tag]

    @property
    def ids(self):
        return [attributes["id"] for _, attributes in self.found if "id" in attributes]

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_report(save(tmp_path_factory.mktemp("kinds"), *all_kinds()))


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory):
    return write_report(save(tmp_path_factory.mktemp("hostile"), hostile(), result()))


def texts(index):
    """The text of a page, and of its Markdown without escapes."""
    markdown = (index.parent / "report.md").read_text(encoding="utf-8").replace("\\", "")
    return Tags(index.read_text(encoding="utf-8")).text, markdown


def test_page_contains_all_findings_of_a_study(page):
    shown, markdown = texts(page)
    told = [
        "What about sharing?", "mixed is significantly the best with 90.0 % [87.5, 92.0].", "data called motion",
        "Behind the best, points", "9,000,000", "A paper, table 1", "64.8 may be meant.",
        "ComRoPE was left out.", "Bands are intervals.",
        "torchrope study probes", "Fake CPU", "0, 1",
    ]  # fmt: skip
    for text in told:
        assert text in shown
        assert text in markdown


def test_page_of_a_comparison_begins_with_accuracy_and_costs(tmp_path):
    costs = replace(points(), name="costs", title="Time of a training step")
    model = {"backbone": "vit", "depth": 2, "dim": 48, "num_heads": 2, "patch_size": [1, 4, 4]}
    compared = result("compare", figures=[points(), costs, curves()])
    run = replace(compared.run, config={"model": model, "optim": {"epochs": 12}})
    index = write_report(save(tmp_path, replace(compared, run=run)))
    told = "Model: backbone vit, depth 2, width 48, heads 2, patch 1×4×4, epochs 12"
    order = [told, "mixed is significantly the best", "Time of a training step", "Behind the best", "while training"]
    for text in texts(index):
        places = [text.index(part) for part in order]
        assert places == sorted(places)


def test_page_orders_studies_and_links_them(page):
    tags = Tags(page.read_text(encoding="utf-8"))
    assert len(tags.ids) == len(set(tags.ids))
    chapters = [
        each for each in tags.ids if each.startswith("study-") and "published" not in each and "table" not in each
    ]
    assert chapters == ["study-compare", "study-accuracy", "study-sharing", "study-resolution", "study-probes"]
    links = [attributes["href"][1:] for attributes in tags.of("a")]
    assert {*chapters, "on-accuracy-digits", "on-accuracy-motion"} <= set(links) <= set(tags.ids)


def test_published_numbers_stand_once_for_all_data_sets(page):
    captions = re.findall(r"<caption><bdi>([^<]+)", page.read_text(encoding="utf-8"))
    assert captions.count("Top-1 in the paper") == 5


def test_page_loads_nothing_and_is_allowed_nothing_else(page):
    html = page.read_text(encoding="utf-8")
    tags = Tags(html)
    loads = [attributes[key] for _, attributes in tags.found for key in ("src", "href", "data") if key in attributes]
    assert all(load.startswith(("#", "data:")) for load in loads)
    (policy,) = [meta["content"] for meta in tags.of("meta") if "http-equiv" in meta]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy


def test_figures_have_a_drawing_alt_text_and_table(page):
    html = page.read_text(encoding="utf-8")
    tags = Tags(html)
    drawings = [attributes for attributes in tags.of("div") if attributes.get("class") == "drawing"]
    assert len(drawings) == len(tags.of("figure")) == 8
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in drawings)
    assert html.count("Data table") == 8
    plotted = [json.loads(each) for each in re.findall(r'class="plot">(.*?)</script>', html)]
    assert [len(each["rows"]) for each in plotted] == [7, 49, 7, 49, 6, 3, 16, 162]
    assert dict(zip((key for key, _ in plotted[1]["columns"]), plotted[1]["rows"][0], strict=True)) == curves().rows[0]


def test_drawings_are_also_files_with_unique_ids(page):
    markdown = (page.parent / "report.md").read_text(encoding="utf-8")
    named = re.findall(r"\]\((figures/[a-z0-9-]+\.svg)\)", markdown)
    assert len(named) == len(set(named)) == 8
    seen: set[str] = set()
    for name in named:
        text = (page.parent / name).read_text(encoding="utf-8")
        ElementTree.fromstring(text)
        ids = re.findall(r'\bid="([^"]+)"', text)
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)
        assert not seen & set(ids)
        seen |= set(ids)


def test_second_rendering_is_byte_identical_and_leaves_no_old_figure(tmp_path):
    save(tmp_path, result(figures=[points(), cells()]))

    def contents():
        write_report(tmp_path)
        return {path: path.read_bytes() for path in (tmp_path / "report").rglob("*") if path.is_file()}

    first = contents()
    assert contents() == first
    save(tmp_path, result(figures=[points()]))
    assert set(first) - set(contents()) == {tmp_path / "report" / "figures" / "accuracy-digits-probes.svg"}


def test_encoding_looks_the_same_everywhere():
    few, many = looks.encoding_looks(["liere", "axial"]), looks.encoding_looks([*ENCODINGS, "liere:2", "liere:4"])
    assert few["liere"] == many["liere"]
    assert few["axial"] == many["axial"]
    assert len(set(many.values())) == len(many)
    for figure in (points(), curves(), panels(), bars()):
        spec = json.dumps(plots.plot(figure, looks.encoding_looks(ENCODINGS)).spec)
        domain, colours = re.search(r'"domain": (\[[^]]*\]), "range": (\["#[^]]*\])', spec).groups()
        for name, colour in zip(json.loads(domain), json.loads(colours), strict=True):
            assert colour == few.get(name, many[name]).colour


def test_label_that_a_table_gives_an_encoding_has_its_look():
    found = looks.page_looks([result()])
    assert found["Called liere"] == found["liere"]


def test_other_names_take_colours_that_a_figure_does_not_use():
    rows = [{"name": name, "epoch": 1, **about(1)} for name in ("trained", "learned", "shuffled")]
    chosen = plots.choose([row["name"] for row in rows], looks.encoding_looks(["learned"]))
    assert chosen["learned"].place == 0
    assert len({look.place for look in chosen.values()}) == 3


def coloured(scale, change):
    rows = [{**row, "score": change(row["score"])} for row in cells().rows]
    return replace(cells(), colour=Axis("score", "Score", scale=scale), rows=rows)


EDGES = {
    "no rows": curves(rows=[]),
    "one row": curves(rows=curves().rows[:1]),
    "nothing but gaps": curves(rows=[{**row, "top1": None, "low": None, "high": None} for row in curves().rows]),
    "no series": curves(series=None, low=None, high=None),
    "zero on a log axis": curves(x=Axis("epoch", "Epoch", scale="log"), rows=[{**curves().rows[0], "epoch": 0}]),
    "all the same": curves(rows=[{**row, "top1": 1, "low": 1, "high": 1} for row in curves().rows]),
    "one colour": replace(cells(), rows=[{**row, "score": 0.0} for row in cells().rows]),
    "colours as names": coloured("category", lambda score: "mixed"),
    "colours on a log scale": coloured("log", lambda score: 1 + abs(score)),
    "many series": curves(rows=[{"name": f"series {i}", "epoch": 1, **about(i)} for i in range(40)]),
    "many panels": curves(panel="name"),
}  # fmt: skip


@pytest.mark.parametrize("figure", EDGES.values(), ids=EDGES.keys())
def test_any_figure_is_drawn(figure):
    plotted = plots.plot(figure, looks.encoding_looks(ENCODINGS))
    text = plots.svg(plotted, "edge")
    ElementTree.fromstring(text)
    assert "NaN" not in text
    assert len(json.loads(plotted.as_json())["rows"]) == len(figure.rows)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (None, 1, "–"), (True, None, "yes"), (False, None, "no"), ("a b", None, "a b"), (580608, None, "580,608"),
        (580608.0, 0, "580,608"), (-1.26, 1, "−1.3"), (-0.01, 1, "0.0"), (0.031234, None, "0.0312"),
        (3.2e-7, None, "3.2e−07"), (96.0, 1, "96.0"), (0, 2, "0.00"),
    ],
)  # fmt: skip
def test_values_are_formatted(value, digits, text):
    assert written(value, digits) == text


def test_hostile_text_stays_text_in_every_file(hostile_page):
    html = hostile_page.read_text(encoding="utf-8")
    tags = Tags(html)
    assert not tags.of("img")
    assert [each.get("type") for each in tags.of("script")].count(None) == 2
    assert len(tags.of("script")) == 2 + 4
    assert not [name for _, attributes in tags.found for name in attributes if name.startswith("on")]
    assert HOSTILE.split(" {{")[0] in " ".join(tags.words)
    figures = list((hostile_page.parent / "figures").iterdir())
    assert len(figures) == 4
    for file in figures:
        assert re.fullmatch(r"[a-z0-9-]{1,170}\.svg", file.name)
        tree = ElementTree.parse(file)
        assert not [node for node in tree.iter() if node.tag.rpartition("}")[2] in ("script", "img", "image")]
    markdown = (hostile_page.parent / "report.md").read_text(encoding="utf-8")
    outside = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    assert "<img" not in outside.replace("\\<", "")
    assert not re.search(r"(?<!\\)\]\(javascript", outside)


def test_characters_that_no_page_may_hold_are_replaced(tmp_path):
    study = result(figures=[points()], title="a\x00b\x1bc\ud800d")
    html = write_report(save(tmp_path, study)).read_text(encoding="utf-8")
    assert "a\ufffdb\ufffdc\ufffdd" in html


def damaged(change):
    study = result(figures=[curves(), cells()]).plain()
    change(study)
    return json.dumps(study)


def damaged_table(change):
    return damaged(lambda s: change(s["findings"]["tables"][0]))


def damaged_figure(change):
    return damaged(lambda s: change(s["findings"]["figures"][0]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a result must be valid JSON or YAML, got"),
        ("[" * 100_000, "a result must be valid JSON or YAML, got"),
        ("[]", "a result must hold named settings, got"),
        (damaged(lambda s: s.pop("question")), "study must have 'question', got"),
        (damaged(lambda s: s["findings"].update(answer=7)), "study.findings.answer must be text, got 7"),
        (damaged_table(lambda t: t["rows"][1].update(gap=[1])), "rows[1].gap must be a number, text"),
        (damaged_figure(lambda f: f.update(kind="pie")), "figures[0].kind must be one of lines"),
        (damaged_figure(lambda f: f.update(name="probes")), "figures must have different names"),
        (damaged(lambda s: s["data"].update(train=10**16)), "study.data.train must be within ±1e+15, got 1000"),
    ],
)
def test_damaged_results_are_refused_and_nothing_is_written(tmp_path, text, message):
    (tmp_path / "accuracy-digits.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        write_report(tmp_path)
    assert "\n" not in str(refused.value)
    assert str(tmp_path / "accuracy-digits.json") in str(refused.value)
    assert not (tmp_path / "report").exists()


def test_folder_without_studies_is_refused(tmp_path):
    rule = "needs results of `torchrope compare`, .*, but .* has no JSON file: run one of them"
    with pytest.raises(ValueError, match=rule):
        write_report(tmp_path)


FOREIGN = {
    "notes.json": ('{"schema": 7}', "schema must be 1, got 7"),
    "a.json": ("{", "must be valid JSON"),
    "._results.json": ("\x00\x05", "must be valid JSON"),
    "evaluated.json": ('{"top1": 0.5, "examples": 40}', "schema must be 1, got None"),
    "copy.json": (json.dumps(result().plain()), "same study and data as accuracy-digits.json"),
    "accuracy-digits (1).json": (json.dumps(result().plain()), "same study and data as accuracy-digits.json"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_files_are_named_and_the_results_reported(tmp_path, caplog, name):
    save(tmp_path, result())
    before = write_report(tmp_path).read_bytes()
    text, message = FOREIGN[name]
    (tmp_path / name).write_text(text)
    assert write_report(tmp_path).read_bytes() == before
    [warned] = caplog.messages
    assert warned.startswith("not in the report: ")
    assert str(tmp_path / name) in warned
    assert message in warned


def test_tasks_of_one_data_set_are_separate_parts_of_a_study(tmp_path):
    save(tmp_path, result())
    other = json.loads((tmp_path / "accuracy-digits.json").read_text())
    other["data"]["title"] += ", another task"
    (tmp_path / "other.json").write_text(json.dumps(other))
    tags = Tags(write_report(tmp_path).read_text(encoding="utf-8"))
    assert len(tags.ids) == len(set(tags.ids))
    assert other["data"]["title"] in tags.text


def test_command_writes_the_page_and_prints_the_answers(tmp_path, run):
    status, printed, _ = run("report", save(tmp_path, result(), result("probes", None)))
    assert status == 0
    assert "accuracy (digits): mixed is significantly the best" in printed
    assert f"report: {tmp_path}/report/index.html" in printed


def test_command_names_a_missing_package(tmp_path, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    status, printed, _ = run("report", save(tmp_path, result(figures=[points()])))
    assert status == 0
    assert "no page: vl_convert is not installed (in a clone of torchrope: pip install . ./lab)" in printed
    assert not (tmp_path / "report").exists()


def seen(browser):
    return (browser.problems, browser.requests)


@pytest.mark.slow
class TestInChromium:
    """What readers see, in a real browser."""

    def test_figures_are_drawn_without_warning_or_request(self, browser, page):
        browser.open(page)
        browser.draw_all()
        assert seen(browser) == ([], [])
        marks = browser.run("[...document.querySelectorAll('figure')].map(f => [...new Set([...f.querySelectorAll("
                            "'.live [class*=mark-]')].map(m => m.getAttribute('class').split(' ')[0]))])")  # fmt: skip
        drawn = [set(each) & {"mark-line", "mark-symbol", "mark-area", "mark-rect", "mark-rule"} for each in marks]
        lines = {"mark-line", "mark-symbol", "mark-area"}
        assert [lines <= each for each in drawn] == [False, True, False, True, False, False, True, False]
        assert all("mark-symbol" in each for each in drawn[:4])
        assert all("mark-rect" in drawn[index] for index in (4, 5, 7))
        bars = "document.querySelectorAll('figure')[4].querySelectorAll('.live .mark-rect path')"
        assert browser.run(f"{bars}.length") >= 6

    def test_colours_of_an_encoding_agree_between_figures_and_tables(self, browser, page):
        browser.open(page)
        browser.draw_all()
        strokes = browser.run(
            "[...document.querySelectorAll('.live .mark-line path')].map(p => p.getAttribute('stroke'))"
        )
        assert strokes.count(looks.encoding_looks(["liere"])["liere"].colour) == 2 + 2
        dot = "getComputedStyle(document.querySelector('.dot.c4')).backgroundColor"
        assert browser.run(dot) == "rgb(230, 159, 0)"

    def test_tables_sort_by_number_with_gaps_last_by_click_and_keyboard(self, browser, page):
        browser.open(page)
        table = "document.getElementById('on-accuracy-digits-table-1')"

        def column(index):
            return browser.run(
                f"[...{table}.tBodies[0].rows].map(r => r.cells[{index}].querySelector('bdi').textContent)"
            )

        def state():
            return browser.run(f"[...{table}.tHead.rows[0].cells].map(c => c.getAttribute('aria-sort'))")

        assert state() == ["none"] * 5
        browser.run(f"{table}.querySelectorAll('thead button')[3].click()")
        assert column(3) == [f"{9 * 10**power:,}" for power in range(6, -1, -1)]
        browser.run(f"{table}.querySelectorAll('thead button')[4].focus()")
        browser.press("Enter", 13, "\r")
        assert column(4) == ["3.0", "2.5", "2.0", "1.5", "0.5", "0.0", "–"]
        assert state() == [*["none"] * 4, "descending"]
        browser.press(" ", 32, " ")
        assert column(4) == ["0.0", "0.5", "1.5", "2.0", "2.5", "3.0", "–"]
        browser.run(f"{table}.querySelectorAll('thead button')[1].click()")
        assert column(1) == sorted(ENCODINGS)
        assert state() == ["none", "ascending", "none", "none", "none"]

    def test_hostile_text_stays_text(self, browser, hostile_page):
        browser.open(hostile_page)
        browser.draw_all()
        assert seen(browser) == ([], [])
        assert browser.run("typeof window.hacked") == "undefined"
        assert browser.run("document.querySelectorAll('main img, main a[href^=javascript]').length") == 0
        assert browser.run("document.querySelector('h2[id^=study-] bdi').textContent").startswith("Accuracy")
        titles = browser.run("[...document.querySelectorAll('figure h4')].map(h => h.textContent)")
        assert titles == [HOSTILE] * 4
        browser.run("document.querySelector('figure').scrollIntoView({block: 'center'})")
        browser.point_at(*browser.run(FIRST_MARK))
        browser.wait_for(TOOLTIP_SHOWN)
        assert HOSTILE in browser.run(f"{TOOLTIP}.textContent")
        assert browser.run(f"{TOOLTIP}.querySelectorAll('img, script').length") == 0

    @pytest.mark.parametrize("width", [360, 800, 1280])
    @pytest.mark.parametrize("which", ["page", "hostile_page"])
    def test_page_fits_the_window_width(self, browser, request, which, width):
        browser.open(request.getfixturevalue(which), width)
        browser.draw_all()
        assert browser.run("document.documentElement.scrollWidth") <= width
        wide = "[...document.querySelectorAll('.live svg')].filter(s => s.getBoundingClientRect().right > innerWidth)"
        assert browser.run(f"{wide}.length") == 0

    def test_figures_follow_the_width_of_the_window(self, browser, page):
        browser.open(page, 1280)
        browser.draw_all()
        svg = "document.querySelector('figure .live svg').getBoundingClientRect().width"
        before = browser.run(svg)
        browser.resize(420)
        browser.wait_for(f"{svg} < {before} - 50")

    def test_dark_mode_recolours_text_and_figures(self, browser, page):
        def colours(dark):
            browser.open(page, dark=dark)
            browser.draw_all()
            line, label = ".live .mark-line path", ".live .role-axis-label text"
            return browser.run(
                "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
                f"getComputedStyle(document.querySelector('{line}')).stroke,"
                f"getComputedStyle(document.querySelector('{label}')).fill,"
                "getComputedStyle(document.querySelector('.dot.c2')).backgroundColor]"
            )

        light, dark = colours(False), colours(True)
        assert all(one != other for one, other in zip(light, dark, strict=True))
        assert dark[0] == "rgb(22, 25, 29)"
        assert dark[1] == dark[3]

    def test_downloads_contain_the_numbers_and_the_drawing(self, browser, page, tmp_path):
        browser.open(page)
        browser.draw_all()
        browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        tools = "[...document.querySelectorAll('figure')][1].querySelectorAll('.tools button')"
        for name in ("SVG", "PNG", "CSV"):
            browser.run(f"[...{tools}].find(b => b.textContent === '{name}').click()")
            file = tmp_path / f"accuracy-digits-curves.{name.lower()}"
            browser.until(lambda file=file: file.exists() and file.stat().st_size)
        head, *rows = (tmp_path / "accuracy-digits-curves.csv").read_text("utf-8-sig").splitlines()
        keys = head.split(",")
        assert set(keys) == {"name", "epoch", "top1", "low", "high"}
        assert [dict(zip(keys, row.split(","), strict=True)) for row in rows] == [
            {key: str(value) for key, value in row.items()} for row in map(in_script, curves().rows)
        ]
        ElementTree.parse(tmp_path / "accuracy-digits-curves.svg")
        assert (tmp_path / "accuracy-digits-curves.png").read_bytes().startswith(b"\x89PNG")

    def test_csv_escapes_formulas_in_names(self, browser, hostile_page, tmp_path):
        browser.open(hostile_page)
        browser.draw_all()
        browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        browser.run("[...document.querySelectorAll('figure')][0].querySelector('.tools button:last-child').click()")
        browser.until(lambda: any(file.stat().st_size for file in tmp_path.glob("*.csv")))
        (file,) = tmp_path.glob("*.csv")
        text = file.read_text("utf-8-sig")
        assert "'=1+1" in text
        assert "'@sum" in text
        assert '""' in text

    def test_zoom_narrows_the_axes_and_reset_restores_them(self, browser, page):
        browser.open(page)
        browser.draw_all()
        labels = (
            "[...document.querySelectorAll('figure')[1].querySelectorAll('.live .role-axis-label text')]"
            ".map(t => t.textContent).sort().join()"
        )
        before = browser.run(labels)
        browser.run("document.querySelectorAll('figure')[1].scrollIntoView({block: 'center'})")
        area = "document.querySelectorAll('figure')[1].querySelector('.live .mark-line path').getBoundingClientRect()"
        at = browser.run(f"(() => {{ const box = {area}; return {{x: box.x + 100, y: box.y + 50}}; }})()")
        browser.call("Input.dispatchMouseEvent", type="mouseWheel", deltaX=0, deltaY=-300, modifiers=2, **at)
        browser.wait_for(f"{labels} !== {json.dumps(before)}")
        for clicks in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                browser.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=clicks, **at)
        browser.wait_for(f"{labels} === {json.dumps(before)}")
        assert browser.problems == []

    def test_hovering_shows_the_values(self, browser, page):
        browser.open(page)
        browser.draw_all()
        browser.run("document.querySelector('figure').scrollIntoView({block: 'center'})")
        browser.point_at(*browser.run(FIRST_MARK))
        browser.wait_for(TOOLTIP_SHOWN)
        tip = browser.run(f"[...{TOOLTIP}.querySelectorAll('tr')].map(row => row.textContent)")
        assert "Top-1, %90" in tip
        browser.press("Escape", 27)
        assert not browser.run(TOOLTIP_SHOWN)

    def test_drawings_are_shown_without_scripts_and_in_print(self, browser, page):
        browser.open(page, scripts=False)
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
        assert browser.run("document.querySelectorAll('figure .drawing > svg').length") == 8
        assert browser.run("document.querySelectorAll('.tools, .live').length") == 0
        browser.open(page, dark=True)
        browser.draw_all()
        scheme = {"name": "prefers-color-scheme", "value": "dark"}
        browser.call("Emulation.setEmulatedMedia", media="print", features=[scheme])
        assert browser.run("getComputedStyle(document.querySelector('.tools')).display") == "none"
        assert (
            browser.run("getComputedStyle(document.querySelector('.live .role-axis-label text')).fill")
            == "rgb(31, 35, 40)"
        )

    def test_controls_are_focusable_and_labelled(self, browser, page):
        browser.open(page)
        browser.draw_all()
        nameless = browser.run(
            "[...document.querySelectorAll('button, a, [role=img], [role=region]')].filter(e =>"
            "!(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.textContent.trim())).length"
        )
        assert nameless == 0
        assert browser.run("[...document.querySelectorAll('th')].every(th => th.scope)")
        levels = browser.run("[...document.querySelectorAll('h1, h2, h3, h4')].map(h => Number(h.tagName[1]))")
        assert all(after - before <= 1 for before, after in pairwise(levels) if before > 1)


def in_script(row):
    """Numbers as JavaScript writes them."""
    return {key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in row.items()}


def contrast(one, other):
    def luminance(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_enough_contrast(dark):
    sheet = (Path(report.__file__).parent / "page.css").read_text()
    named = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", sheet)
    colours = {name: pair[dark] for name, *pair in named}
    for ink in ("ink", "soft", "accent"):
        for paper in ("paper", "card"):
            assert contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)
    assert contrast(colours["edge"], colours["paper"]) >= 3


def test_comparison_alone_is_a_page_with_its_answer_and_what_is_missing(tmp_path):
    left_out = {"skipped": ["a.png (truncated)"], "unread": "1 .heic not read because they are not images: b.heic"}
    compared = result("compare", title="Comparison", unfinished=["mixed seed 1"])
    replace(compared, data=replace(compared.data, **left_out)).write(tmp_path / "results.json")
    shown, markdown = texts(write_report(tmp_path))
    assert "Comparison: data called digits" in shown
    assert "Not finished yet: mixed seed 1" in shown
    assert "mixed seed 1" in markdown
    for text in (shown, markdown):
        assert "Left out because they could not be read: a.png (truncated). 1 .heic not read because" in text


def test_command_shows_a_comparisons_table(tmp_path, run):
    result("compare").write(tmp_path / "results.json")
    lines = run("report", tmp_path)[1].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("Name"))
    assert len({len(line) for line in lines[start + 1 : start + 2 + len(ENCODINGS)]}) <= 3
    assert lines[start + 2].startswith("none")
    assert "90.0 [87.5, 92.0]" in lines[start + 2]


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (0.031234, "0.0312"), (9.5, "9.50"), (123.4, "123"), (12345.6, "12,346")]
)
def test_significant_digits_need_no_exponent(number, text):
    assert tables.significant(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(4.25, "4.25 s"), (210, "3 min 30 s"), (7300, "2 h 1 min")])
def test_duration_is_formatted_in_readable_units(seconds, text):
    assert tables.duration(seconds) == text


@pytest.mark.parametrize(("place", "failing"), [(os, "fsync"), (os, "replace"), (page_module, "render_markdown")])
def test_failed_write_leaves_the_old_page_and_no_temporary_file(tmp_path, monkeypatch, place, failing):
    def contents():
        return {path: path.is_file() and path.read_bytes() for path in (tmp_path / "report").rglob("*")}

    def no_space(*args, **kwargs):
        raise OSError("no space left")

    write_report(save(tmp_path, result()))
    before = contents()
    save(tmp_path, result(title="Something else"))
    monkeypatch.setattr(place, failing, no_space)
    with pytest.raises(OSError, match="no space left"):
        write_report(tmp_path)
    assert contents() == before
