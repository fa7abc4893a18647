import ast
import copy
import itertools
import json
import math
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from torchrope.lab.report import page, tables
from torchrope.lab.report.figures import all_drawings, looks
from torchrope.lab.report.load import read_results
from torchrope.lab.report.page import formula_html, write_report
from torchrope.lab.report.readme import encodings_and_results, insert_between_markers

# name, label, final accuracy, after shuffling, encoding parameters, MFLOPs, seconds per step, relative
FAKES = [
    ("none", "No encoding", 0.883, 0.883, 0, 30.1, 0.0181, None),
    ("learned", "Learned, added to tokens", 0.9361, 0.289, 4096, 30.1, 0.0182, None),
    ("axial", "RoPE, axial", 0.9528, 0.231, 0, 30.2, 0.0204, True),
    ("mixed", "RoPE, mixed frequencies", 0.9639, 0.204, 256, 30.2, 0.0209, True),
    ("liere:4", "LieRE, blocks of 4", 0.9611, 0.211, 384, 33.8, 0.0312, False),
    ("liere", "LieRE, one block per head", 0.9667, 0.197, 960, 71.5, 0.0747, False),
    ("comrope-ap", "ComRoPE, axis partition", 0.9500, 0.242, 512, 31.9, 0.0231, True),
    ("comrope-ld", "ComRoPE, linearly dependent", 0.9583, 0.215, 520, 31.9, 0.0236, True),
    ("learned+mixed", "Learned, with RoPE mixed", 0.9556, 0.218, 4352, 30.2, 0.0214, False),
]


def fake_results(seeds=1, names=None):
    fakes = [fake for fake in FAKES if names is None or fake[0] in names]
    encodings = [fake_encoding(*fake, seeds) for fake in fakes]
    best = max(encoding["top1"]["mean"] for encoding in encodings)
    ordered = sorted(encodings, key=lambda encoding: -encoding["top1"]["mean"])
    return {
        "schema": 1,
        "study": "compare",
        "data": {
            "name": "digits",
            "title": "handwritten digits",
            "description": "Grey pictures of handwritten digits from scikit-learn.",
            "axes": ["height", "width"],
            "input_size": [8, 8],
            "patch_size": [1, 1],
            "tokens": 64,
            "num_classes": 10,
            "train": 1437,
            "val": 360,
            "chance": 0.1,
            "skipped": [],
        },
        "encodings": encodings,
        "ranking": [fake_place(rank, encoding, best) for rank, encoding in enumerate(ordered, 1)],
        "answer": f"Use {ordered[0]['name']}: no other is more accurate, and a step takes 4.1 times as long.",
        "run": {
            "command": "torchrope compare --data digits",
            "commit": "abc1234",
            "torchrope": "0.1.0",
            "versions": {"torch": "2.14.1", "pytorch-lightning": "2.6.6"},
            "machine": {"cpu": "Fake CPU", "cores": 2, "memory_gb": 24, "device": "cpu", "os": "Linux"},
            "seeds": list(range(seeds)),
            "date": "2026-11-21",
            "seconds": 210.0,
            "config": {"model": {"depth": 4, "width": 64}, "training": {"epochs": 20, "lr": 0.001}},
        },
        "unfinished": [],
    }


def few_results(seeds=1):
    return fake_results(seeds, names={"none", "mixed", "liere"})


def fake_encoding(name, label, top1, shuffled, parameters, mflops, step_seconds, relative, seeds):
    spread = 0.006 if seeds > 1 else None
    sizes = [([6, 6], 0.82), ([8, 8], 1.0), ([10, 10], 0.93), ([12, 12], 0.8)]
    return {
        "name": name,
        "label": label,
        "summary": f"{label}: one line that says what it is.",
        "formula": "R(p) = exp(sum_a p_a A_a), A_a = P - P^T",
        "source": "A paper (Author et al.), Eq. 3",
        "rotary": relative is not None,
        "relative": relative,
        "seeds": [fake_seed(seed, top1 + 0.006 * (seed - (seeds - 1) / 2), shuffled) for seed in range(seeds)],
        "top1": {"mean": top1, "spread": spread, "interval": [top1 - 0.021, min(1.0, top1 + 0.017)]},
        "val_loss": {"mean": 1.3 * (1 - top1) + 0.07, "spread": spread},
        "shuffled_top1": {"mean": shuffled, "spread": spread},
        "resolutions": [
            {"size": size, "mean": top1 * kept ** (1 if relative else 2), "spread": spread} for size, kept in sizes
        ],
        "cost": {
            "parameters": 210_000 + parameters,
            "encoding_parameters": parameters,
            "flops": mflops * 1e6,
            "step_seconds": step_seconds,
            "peak_memory_bytes": 9e7 + 2e8 * step_seconds,
        },
    }


def fake_seed(seed, top1, shuffled):
    curve = [
        {
            "epoch": epoch,
            "train_loss": 2.3 * math.exp(-epoch / 5),
            "val_loss": 2.1 * math.exp(-epoch / (4 + 8 * (1 - top1))) + 1.3 * (1 - top1),
            "val_top1": top1 - 0.85 * math.exp(-epoch / (3 + 12 * (1 - top1))) + 0.01 * math.sin(3 * epoch + seed),
            "seconds": 1.2,
        }
        for epoch in range(1, 21)
    ]
    return {"seed": seed, "top1": top1, "val_loss": 0.2, "shuffled_top1": shuffled, "curve": curve}


def fake_place(rank, encoding, best):
    gap = best - encoding["top1"]["mean"]
    verdict = "best" if rank == 1 else "tied" if gap < 0.012 else "behind"
    why = f"{100 * gap:.1f} points behind, {'within' if gap < 0.012 else 'more than'} the interval"
    return {"name": encoding["name"], "rank": rank, "gap": gap, "verdict": verdict, "why": why}


def save(out: Path, results) -> Path:
    (out / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return out


def written(out: Path, results) -> str:
    return write_report(save(out, results)).read_text(encoding="utf-8")


def without(results, *keys):
    """Drop a key from every encoding."""
    results = copy.deepcopy(results)
    for encoding in results["encodings"]:
        for key in keys:
            del encoding[key]
    return results


class Tags(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.found = []
        self.open = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "br", "img"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def of(self, tag):
        return [attrs for name, attrs in self.found if name == tag]


@pytest.mark.parametrize("seeds", [1, 3])
def test_page_and_markdown_show_every_encoding_with_the_numbers_of_its_row(tmp_path, seeds):
    results = fake_results(seeds)
    html = written(tmp_path, results)
    markdown = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    rows = tables.result_rows(results)
    assert [row.name for row in rows] == [place["name"] for place in results["ranking"]]
    for row in rows:
        line = next(line for line in markdown.splitlines() if f"| {row.name} |" in line)
        shown = html[html.index(f"<code>{row.name}</code>") :].split("</tr>")[0]
        hidden = {"rank", "name", "label", "verdict", "spread", "val_loss_spread"}
        for text in (text for field, text in vars(row).items() if field not in hidden):
            assert text in line
            assert text in shown


def test_numbers_are_written_for_people():
    row = next(row for row in tables.result_rows(fake_results(3)) if row.name == "liere")
    assert (row.top1, row.interval, row.spread) == ("96.7", "94.6, 98.4", "0.6")
    assert (row.shuffled, row.drop, row.val_loss) == ("19.7", "−77.0", "0.113")
    assert (row.encoding_parameters, row.parameters) == ("960", "210,960")
    assert (row.mflops, row.step_ms, row.step_ratio, row.memory_mb) == ("71.5", "74.7", "4.13×", "105")


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (0.031234, "0.0312"), (9.5, "9.50"), (123.4, "123"), (12345.6, "12,346")]
)
def test_significant_digits_need_no_exponent(number, text):
    assert tables.significant(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(4.25, "4.25 s"), (210, "3 min 30 s"), (7300, "2 h 1 min")])
def test_duration_is_one_a_person_can_judge(seconds, text):
    assert tables.duration(seconds) == text


def test_no_change_has_no_sign():
    assert tables.signed_points(-0.0001) == "0.0"


def test_step_times_are_compared_with_none_or_else_the_cheapest():
    results = fake_results()
    assert tables.ratio_heading(results) == "× none"
    assert [row.step_ratio for row in tables.result_rows(results) if row.name == "none"] == ["1.00×"]
    rotary = fake_results(names={"liere", "mixed"})
    assert tables.ratio_heading(rotary) == "× mixed"
    assert {row.name: row.step_ratio for row in tables.result_rows(rotary)} == {
        "mixed": "1.00×",
        "liere": "3.57×",
    }


def test_step_times_are_compared_with_none_though_others_are_quicker_and_some_have_no_time():
    results = few_results()
    for encoding, seconds in zip(results["encodings"], (0.02, 0.01, None), strict=True):
        encoding["cost"]["step_seconds"] = seconds
    assert tables.base_encoding(results)["name"] == "none"
    assert {row.name: row.step_ratio for row in tables.result_rows(results)} == {
        "none": "1.00×",
        "mixed": "0.50×",
        "liere": "–",
    }
    results["encodings"][0]["cost"]["step_seconds"] = 0.0  # no time that others could be compared with
    assert tables.ratio_heading(results) == "× mixed"
    for encoding in results["encodings"]:
        del encoding["cost"]
    assert tables.base_encoding(results) is None
    assert tables.ratio_heading(results) == "×"
    assert {row.step_ratio for row in tables.result_rows(results)} == {"–"}


def test_spread_shows_only_where_there_are_several_seeds(tmp_path):
    once = written(tmp_path, few_results(1))
    assert "±" not in re.search(r"<table class=\"results\">.*?</table>", once, re.DOTALL)[0]
    assert "trained once" in once
    thrice = written(tmp_path, few_results(3))
    assert "± 0.6" in thrice
    assert "trained 3 times" in thrice
    assert "bands reach" in thrice
    assert "bands reach" not in once


def test_page_loads_nothing_from_outside(tmp_path):
    tags = Tags(written(tmp_path, few_results(3)))
    loads = [attrs[key] for _, attrs in tags.found for key in ("src", "href", "xlink:href", "data") if key in attrs]
    assert loads
    assert all(load.startswith(("#", "data:")) for load in loads)
    assert not tags.of("script")
    style = (Path(page.__file__).parent / "style.css").read_text()
    assert "url(" not in style
    assert "@import" not in style


def test_page_is_well_formed_and_can_be_read_aloud(tmp_path):
    tags = Tags(written(tmp_path, few_results(3)))
    assert tags.open == []
    assert len(tags.of("th")) == 10 + 3 + 5 + 3
    assert all(attrs.get("scope") in {"row", "col"} for attrs in tags.of("th"))
    pictures = [attrs for attrs in tags.of("div") if attrs.get("role") == "img"]
    assert len(pictures) == len(tags.of("figure")) == 5
    assert all("liere" in attrs["aria-label"] for attrs in pictures)
    ids = [attrs["id"] for _, attrs in tags.found if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_every_reference_inside_a_figure_points_into_it():
    for drawing in all_drawings(few_results(3)):
        ids = set(re.findall(r'\bid="([^"]+)"', drawing.svg))
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', drawing.svg)) <= ids
        assert all(name.startswith(drawing.name) for name in ids)


def test_second_rendering_is_byte_identical(tmp_path):
    def contents():
        write_report(tmp_path)
        return {path: path.read_bytes() for path in (tmp_path / "report").rglob("*") if path.is_file()}

    save(tmp_path, few_results(3))
    first = contents()
    assert len(first) == 7
    assert contents() == first


def test_markdown_refers_to_figures_that_exist(tmp_path):
    written(tmp_path, few_results())
    markdown = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    files = re.findall(r"\]\((figures/[^)]+\.svg)\)", markdown)
    assert len(files) == 5
    for file in files:
        ElementTree.parse(tmp_path / "report" / file)


def label_box(node):
    """Bound a label by its baseline, the height of its ascenders and half its font size per letter."""
    x, y = float(node.get("x")), float(node.get("y"))
    return x, y - 7, x + 4.5 * len(node.text), y


def test_labels_of_close_points_do_not_cover_each_other():
    results = fake_results()
    names = {encoding["name"] for encoding in results["encodings"]}
    svg = next(drawing.svg for drawing in all_drawings(results) if drawing.name == "cost")
    tree = ElementTree.fromstring(svg)
    width, height = (float(side) for side in tree.get("viewBox").split()[2:])
    boxes = [label_box(node) for node in tree.iter() if node.text in names]
    assert len(boxes) == len(names)
    assert all(min(left, top, width - right, height - bottom) > 0 for left, top, right, bottom in boxes)
    for one, other in itertools.combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, (one, other)


HOSTILE = """<script>alert("x")</script>|$a_b$ id="q" & 'c'"""


def test_hostile_text_stays_text(tmp_path):
    results = fake_results(3, names={"none", "mixed"})
    encoding = results["encodings"][1]
    results["ranking"][0]["name"] = HOSTILE
    for key in ("name", "label", "summary", "formula", "source"):
        encoding[key] = HOSTILE
    results["answer"] = results["run"]["command"] = results["data"]["title"] = HOSTILE
    results["ranking"][0]["why"] = results["ranking"][0]["verdict"] = HOSTILE
    results["unfinished"] = results["data"]["skipped"] = [HOSTILE]
    html = written(tmp_path, results)
    assert "<script" not in html
    assert Tags(html).open == []
    assert "$a_b$ id=&#34;q&#34;" in html
    for file in (tmp_path / "report" / "figures").iterdir():
        words = [node.text for node in ElementTree.parse(file).iter() if node.tag.endswith("}text")]
        assert not any(word and "script" in word and word != HOSTILE for word in words)
    table = tables.markdown_results(tables.result_columns(results), tables.result_rows(results))
    assert "<script" not in table.replace("\\<", "")
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()} == {18}


def test_one_encoding_alone_makes_a_page(tmp_path):
    html = written(tmp_path, fake_results(names={"mixed"}))
    assert html.count("<figure>") == 5
    assert "× mixed" in html


def test_looks_differ_for_every_encoding_and_keep_none_grey():
    results = fake_results()
    results["encodings"] = [{"name": f"e{i}"} for i in range(24)]
    seen = [tuple(look.values()) for look in looks(results).values()]
    assert len(set(seen)) == 25
    first, second = looks(fake_results()), looks(fake_results(3))
    assert first == second


def test_missing_parts_leave_dashes_and_no_empty_figure(tmp_path):
    results = without(few_results(), "resolutions", "shuffled_top1", "cost", "val_loss", "seeds", "summary", "formula")
    for key in ("commit", "config", "machine", "seconds"):
        del results["run"][key]
    for encoding in results["encodings"]:
        encoding["top1"].update(interval=None)
    html = written(tmp_path, results)
    assert "<figure>" not in html
    assert "Full configuration" not in html
    assert "not recorded" in html
    row = tables.result_rows(results)[0]
    assert {row.interval, row.spread, row.val_loss, row.shuffled, row.drop, row.mflops, row.step_ratio} == {"–"}


def test_one_tested_size_makes_no_resolution_table():
    results = few_results()
    for encoding in results["encodings"]:
        encoding["resolutions"] = encoding["resolutions"][1:2]
    assert tables.resolution_table(results) is None
    assert "resolutions" not in {drawing.name for drawing in all_drawings(results)}


def test_size_that_one_encoding_was_not_tested_at_is_a_dash():
    results = fake_results(names={"mixed", "learned"})
    del results["encodings"][0]["resolutions"][0]
    table = tables.resolution_table(results)
    assert (table.sizes, table.trained) == (["6×6", "8×8", "10×10", "12×12"], 1)
    assert dict(table.rows)["learned"][0] == "–"
    assert dict(table.rows)["mixed"][0] == "79.0"


def test_diverged_loss_is_a_gap_not_an_error(tmp_path):
    results = few_results()
    results["encodings"][0]["val_loss"]["mean"] = math.nan
    results["encodings"][0]["seeds"][0]["curve"][4]["val_loss"] = math.inf
    written(tmp_path, results)
    read = read_results(tmp_path / "results.json")
    assert next(row.val_loss for row in tables.result_rows(read) if row.name == "none") == "–"


def test_unfinished_runs_and_skipped_files_are_told(tmp_path):
    results = few_results(3)
    results["unfinished"] = ["comrope-ld seed 1"]
    results["data"]["skipped"] = ["broken.png: not a picture"]
    html = written(tmp_path, results)
    markdown = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    for text in ("comrope-ld seed 1", "broken.png: not a picture"):
        assert text in html
        assert text in markdown


def nested(levels):
    return [nested(levels - 1)] if levels else 0


def broken(change):
    results = fake_results()
    change(results)
    return json.dumps(results)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "results must be JSON, got"),
        ("[]", "results must be an object, got []"),
        (broken(lambda r: r.update(schema=2)), "schema must be 1, got 2"),
        (broken(lambda r: r.update(study="other")), "study must be 'compare', got 'other'"),
        (broken(lambda r: r.pop("answer")), "results must have 'answer', got"),
        (broken(lambda r: r["encodings"][2].pop("top1")), "results.encodings[2] must have 'top1', got"),
        (broken(lambda r: r["encodings"][0]["top1"].update(mean="x")), "top1.mean must be a number, got 'x'"),
        (broken(lambda r: r["encodings"][0]["top1"].update(mean=math.nan)), "top1 must have 'mean', got"),
        (
            broken(lambda r: r["encodings"][0]["top1"].update(interval=[1])),
            "interval must hold 2 items, got 1",
        ),
        (broken(lambda r: r["run"].update(config=[])), "results.run.config must be an object, got []"),
        (broken(lambda r: r.update(encodings={})), "results.encodings must be a list, got {}"),
        (broken(lambda r: r.update(encodings=[], ranking=[])), "at least one encoding, got none"),
        (broken(lambda r: r["ranking"].pop()), "ranking must place every encoding once"),
        (broken(lambda r: r["ranking"][0].update(name="new")), "ranking must place every encoding once"),
        ("\xff", "results must be JSON, got"),
        ("[" * 100_000, "nesting must be at most 100 levels deep, got more"),
        (broken(lambda r: r["run"]["config"].update(deep=nested(150))), "nesting must be at most 100 levels deep"),
        (broken(lambda r: r["data"].update(tokens=10**400)), "whole numbers must fit into 64 bits, got one of 1329"),
        (broken(lambda r: r["data"].update(tokens=10**16)), "results.data.tokens must lie within ±1e+15, got 1000"),
        (broken(lambda r: r["run"].update(seconds=0)).replace('"seconds": 0', '"seconds": 1e400'), "±1e+300, got inf"),
    ],
)
def test_unreadable_results_are_refused_in_one_line(tmp_path, text, message):
    (tmp_path / "results.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        write_report(tmp_path)
    assert "\n" not in str(refused.value)
    assert str(tmp_path / "results.json") in str(refused.value)
    assert not (tmp_path / "report").exists()


def test_missing_results_are_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"needs the results.json .* got no file at .*results\.json"):
        write_report(tmp_path)


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_failed_write_leaves_the_old_page_and_no_litter(tmp_path, monkeypatch, failing):
    old = written(tmp_path, few_results())
    before = sorted(path.name for path in (tmp_path / "report").rglob("*"))

    def no_space(*args, **kwargs):
        raise OSError("no space left")

    changed = few_results(3)
    changed["answer"] = "Something else."
    save(tmp_path, changed)
    monkeypatch.setattr(os, failing, no_space)
    with pytest.raises(OSError, match="no space left"):
        write_report(tmp_path)
    assert (tmp_path / "report" / "index.html").read_text(encoding="utf-8") == old
    assert sorted(path.name for path in (tmp_path / "report").rglob("*")) == before


def test_results_that_cannot_be_drawn_leave_the_old_page(tmp_path, monkeypatch):
    old = written(tmp_path, few_results())
    monkeypatch.setattr(page, "render_markdown", lambda *_: 1 / 0)
    save(tmp_path, few_results(3))
    with pytest.raises(ZeroDivisionError):
        write_report(tmp_path)
    assert (tmp_path / "report" / "index.html").read_text(encoding="utf-8") == old


def test_figures_of_an_earlier_run_do_not_stay_behind(tmp_path):
    written(tmp_path, few_results())
    written(tmp_path, without(few_results(), "resolutions"))
    assert not (tmp_path / "report" / "figures" / "resolutions.svg").exists()
    assert (tmp_path / "report" / "figures" / "cost.svg").exists()


def test_terminal_table_is_aligned_and_fits():
    table = tables.plain_table(fake_results(3)).splitlines()
    assert len(table) == 11
    assert all(len(line) <= 110 for line in table)
    rule = table[1]
    gaps = [match.start() for match in re.finditer("  ", rule)]
    assert all(line[gap : gap + 2].strip() == "" for line in table for gap in gaps)
    assert table[2].split()[:5] == ["1", "liere", "96.7", "[94.6,", "98.4]"]
    assert table[0].split()[0] == "rank"


def test_readme_block_ranks_the_encodings_and_says_where_they_come_from():
    block = encodings_and_results(fake_results(3)).splitlines()
    names = [line.split(" | ")[2] for line in block if line.startswith("| ")][2:]
    assert names == [place["name"] for place in fake_results()["ranking"]]
    assert "1,437" in block[-1]
    assert "Fake CPU" in block[-1]


def test_block_goes_between_its_markers_and_nothing_else_moves():
    text = "a\n<!-- results:begin -->\nold\n<!-- results:end -->\nz <!-- other:begin --><!-- other:end -->\n"
    once = insert_between_markers(text, "results", "| new |\n")
    assert once == text.replace("old", "| new |")
    assert insert_between_markers(once, "results", "| new |\n") == once


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        "<!-- results:begin --> only",
        "<!-- results:end --> <!-- results:begin -->",
        "<!-- results:begin --> <!-- results:begin --> <!-- results:end -->",
    ],
)
def test_text_without_both_markers_is_refused(text):
    with pytest.raises(ValueError, match="must hold <!-- results:begin -->"):
        insert_between_markers(text, "results", "block")


def test_kind_of_an_encoding_is_told_in_words():
    kinds = {row.name: row.kind for row in tables.encoding_rows(fake_results())}
    assert kinds["none"] == "not rotary"
    assert kinds["axial"] == "rotary, relative"
    assert kinds["liere"] == "rotary, not relative"


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("exp(sum_a p_a A_a)", "exp(Σ<sub>a</sub> p<sub>a</sub> A<sub>a</sub>)"),
        ("theta_i P^T < x^{2n}", "θ<sub>i</sub> P<sup>T</sup> &lt; x<sup>2n</sup>"),
        ("summary of pie", "summary of pie"),
    ],
)
def test_formula_gets_signs_and_indices(text, html):
    assert str(formula_html(text)) == html


def test_report_imports_no_model():
    allowed = {"matplotlib", "jinja2", "markupsafe", "vl_convert", "torchrope"}
    for file in Path(page.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.split(".")[0]
                assert top in allowed or top in sys.stdlib_module_names, f"{file.name} imports {name}"
                assert top != "torchrope" or name.startswith(("torchrope.lab.report", "torchrope.files"))
