"""Arrange results into chapters, one per study, with rendered figures and formatted tables."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from itertools import count as count_from
from typing import Any

from torchrope_lab.report.looks import Look, look_class
from torchrope_lab.report.pictures import sheet
from torchrope_lab.report.plots import Plot, plot, slug, svg
from torchrope_lab.report.read import Study
from torchrope_lab.report.tables import Cell, Shown, count, duration, percent, show_table, size

# Figures with more marks have no static drawing on the page, only in report.md.
MANY = 2000
# Longer tables of a figure's numbers are only in its CSV.
LONG = 400


@dataclass(frozen=True)
class Drawn:
    """A rendered figure or pictures, for the page and for Markdown.

    Attributes:
        name: Name of the file, and id on the page.
        figure: The dictionary of the `Figure` or `Pictures`.
        svg: Static drawing.
        plot: The specification of a figure; None for pictures.
        numbers: The numbers of a figure as a table; None if there are too many.
    """

    name: str
    figure: dict[str, Any]
    svg: str
    plot: Plot | None = None
    numbers: Shown | None = None


@dataclass(frozen=True)
class Part:
    """A study on one data set.

    Attributes:
        id: Id of the section on the page.
        study: The result.
        data: Title of the data set.
        about: Sentence on the data and its size.
        drawn: Its figures.
        shots: Its pictures, images with ground truth and predictions.
        tables: Its tables.
        facts: (name, value) pairs of provenance.
    """

    id: str
    study: Study
    data: str
    about: str
    drawn: list[Drawn]
    shots: list[Drawn]
    tables: list[Shown]
    facts: list[tuple[str, str]]


@dataclass(frozen=True)
class Chapter:
    """A study on all its data sets, and published results."""

    id: str
    title: str
    question: str
    sources: list[str]
    parts: list[Part]
    published: list[Shown]


def arrange(studies: Sequence[Study], looks: dict[str, Look]) -> list[Chapter]:
    """Render every figure and table, and group results by study."""
    taken: set[str] = set()
    chapters: dict[str, list[Study]] = {}
    for study in studies:
        chapters.setdefault(study["study"], []).append(study)
    return [_chapter(name, group, looks, taken) for name, group in chapters.items()]


def terminal_text(study: Study) -> str:
    """Format a result for the terminal: the answer, with the main table of a comparison or of `torchrope speed`."""
    findings, data = study["findings"], study.get("data")
    main = next(iter(findings["tables"]), None)
    if main and study["study"] in ("compare", "runs"):
        columns = [column for column in main["columns"] if column["key"] != "encoding"]
        missing = [f"not finished yet: {', '.join(study['unfinished'])}"] if study["unfinished"] else []
        return "\n\n".join([show_table({**main, "columns": columns}, {}).aligned(), findings["answer"], *missing])
    if main and study["study"] == "speed":
        medians = [{**column, "low": None, "high": None} for column in main["columns"]]
        table = show_table({**main, "columns": medians}, {})
        return "\n\n".join([table.aligned(), findings["answer"], "\n".join(findings["notes"])])
    on = f" ({data['name']})" if data else ""
    return " ".join(f"{study['study']}{on}: {findings['answer']}".split())


def title_of(chapters: Sequence[Chapter]) -> str:
    """Return the title of a page."""
    if len(chapters) == 1:
        on = {part.data for part in chapters[0].parts}
        return f"{chapters[0].title}: {', '.join(on)}" if len(on) == 1 and "" not in on else chapters[0].title
    return "Position encodings compared"


def advice_table(chapters: Sequence[Chapter], looks: dict[str, Look]) -> list[dict[str, Any]]:
    """Collect the advice of all studies, in order."""
    return [
        {
            "case": advice["case"],
            "encodings": [Cell(name, look=look_class(name, looks)) for name in advice["encodings"]],
            "because": advice["because"],
            "part": part,
            "chapter": chapter,
        }
        for chapter in chapters
        for part in chapter.parts
        for advice in part.study["findings"]["advice"]
    ]


def _chapter(name: str, studies: Sequence[Study], looks: dict[str, Look], taken: set[str]) -> Chapter:
    published = {json.dumps(table): table for study in studies for table in study["findings"]["published"]}
    first = studies[0]
    return Chapter(
        id=unique(f"study-{slug(name)}", taken),
        title=first["title"],
        question=first["question"],
        sources=list(dict.fromkeys(source for study in studies for source in study["sources"])),
        parts=[_part(study, looks, taken) for study in studies],
        published=[show_table(table, looks) for table in published.values()],
    )


def _part(study: Study, looks: dict[str, Look], taken: set[str]) -> Part:
    data = study.get("data") or {}
    named = slug(study["study"], data["name"]) if data else slug(study["study"])
    findings = study["findings"]
    return Part(
        id=unique(f"on-{named}", taken),
        study=study,
        data=data.get("title", ""),
        about=data_sentence(data),
        drawn=[
            _draw(figure, unique(f"{named}-{slug(figure['name'])}", taken), looks) for figure in findings["figures"]
        ],
        shots=[
            Drawn(name, pictures, sheet(pictures, name))
            for pictures in findings["pictures"]
            for name in [unique(f"{named}-{slug(pictures['name'])}", taken)]
        ],
        tables=[show_table(table, looks) for table in findings["tables"]],
        facts=run_facts(study["run"]),
    )


def _draw(figure: dict[str, Any], name: str, looks: dict[str, Look]) -> Drawn:
    drawn = plot(figure, looks)
    table = {
        "title": figure["title"],
        "columns": [{"key": key, "title": title} for key, title in drawn.columns],
        "rows": [dict(zip((key for key, _ in drawn.columns), row, strict=True)) for row in drawn.rows],
    }
    numbers = show_table(table, looks) if len(figure["rows"]) <= LONG else None
    return Drawn(name, figure, svg(drawn, name), drawn, numbers)


def data_sentence(data: dict[str, Any]) -> str:
    """Describe the data and its size."""
    facts = [
        f"{count(data['train'])} training examples" if data.get("train") is not None else "",
        f"{count(data['val'])} validation examples" if data.get("val") is not None else "",
        f"{count(data['num_classes'])} classes" if data.get("num_classes") is not None else "",
        f"inputs of {size(data['input_size'])}" if data.get("input_size") else "",
        f"{' × '.join(data['axes'])}" if data.get("axes") else "",
        f"chance {percent(data['chance'])} %" if data.get("chance") is not None else "",
    ]
    listed = ", ".join(fact for fact in facts if fact)
    described = data.get("description") or ""
    return " ".join(filter(None, [described, f"{listed[0].upper()}{listed[1:]}." if listed else ""]))


def unique(wanted: str, taken: set[str]) -> str:
    """Return a name that is not taken, with a number if need be, and take it."""
    names = chain([wanted], (f"{wanted}-{n}" for n in count_from(2)))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return name


def all_drawn(chapters: Sequence[Chapter]) -> list[Drawn]:
    """Return every figure and every picture."""
    parts = [part for chapter in chapters for part in chapter.parts]
    return [drawn for part in parts for drawn in (*part.drawn, *part.shots)]


def run_facts(run: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the provenance of a run, apart from its command and configuration."""
    seeds = (run.get("config") or {}).get("seeds")
    facts = [
        ("Commit", run.get("commit") or "not recorded"),
        ("torchrope", run.get("torchrope")),
        ("Versions", _pairs(run.get("versions"))),
        ("Seeds", ", ".join(map(str, range(seeds))) if isinstance(seeds, int) and 0 < seeds <= 1000 else None),
        ("Machine", _machine(run.get("machine") or {})),
        ("Date", run.get("date")),
        ("Training", "; ".join(_training(group, run) for group in run.get("trained", ()))),
        ("Duration", duration(run["seconds"]) if run.get("seconds") is not None else None),
    ]
    return [(name, str(fact)) for name, fact in facts if fact]


def _training(group: dict[str, Any], run: dict[str, Any]) -> str:
    """Describe training runs of one machine and state of the code, by what differs from the writing of the results."""
    facts = {
        "at commit": group.get("commit") if group.get("commit") != run.get("commit") else None,
        "with": _pairs(group.get("versions")) if group.get("versions") != run.get("versions") else None,
        "on": _machine(group.get("machine") or {}) if group.get("machine") != run.get("machine") else None,
        "in": group.get("date"),
    }
    runs = f"{group['runs']} run{'s' * (group['runs'] != 1)}"
    return ", ".join([runs, *(f"{word} {fact}" if word != "in" else fact for word, fact in facts.items() if fact)])


def _pairs(versions: dict[str, Any] | None) -> str:
    return ", ".join(f"{name} {version}" for name, version in (versions or {}).items())


def _machine(machine: dict[str, Any]) -> str:
    written = {
        "cores": lambda cores: f"{cores} cores",
        "memory_gb": lambda gib: f"{gib:.0f} GiB memory",
        "device": lambda device: f"device {device}",
    }
    return ", ".join(written.get(name, str)(value) for name, value in machine.items() if value not in (None, ""))
