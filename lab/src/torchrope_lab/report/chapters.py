"""Arrange results into chapters, one per study, with rendered figures and formatted tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from itertools import count as count_from

from torchrope_lab.conclusion import join_names
from torchrope_lab.report.looks import Look
from torchrope_lab.report.pictures import sheet
from torchrope_lab.report.plots import Plot, plot, slug, svg
from torchrope_lab.report.tables import FormattedTable, count, duration, format_table, percent, size
from torchrope_lab.results import DataFacts, Figure, Pictures, Row, RunFacts, StudyResult, TrainedFacts

# Figures with more marks have no static drawing on the page, only in report.md.
MANY = 2000
# Longer tables of a figure's numbers are only in its CSV.
LONG = 400


@dataclass(frozen=True)
class Drawing:
    """A rendered figure or pictures, for the page and for Markdown."""

    name: str  # of the file, and id on the page
    figure: Figure | Pictures
    svg: str  # static drawing
    plot: Plot | None = None  # None for pictures
    numbers: FormattedTable | None = None  # of a figure as a table; None if there are too many


@dataclass(frozen=True)
class Part:
    """A study on one data set."""

    id: str  # of the section on the page
    study: StudyResult
    data: str  # title of the data set
    about: str  # sentence on the data and its size
    figures: list[Drawing]
    pictures: list[Drawing]
    tables: list[FormattedTable]
    facts: list[tuple[str, str]]  # (name, value) pairs of provenance

    @property
    def title(self) -> str:
        """Title of the study and of the data set."""
        return ", ".join(filter(None, [self.study.title, self.data]))


@dataclass(frozen=True)
class Chapter:
    """A study on all its data sets, and published results."""

    id: str
    title: str
    question: str
    sources: list[str]
    parts: list[Part]
    published: list[FormattedTable]


def arrange(studies: Sequence[StudyResult], looks: Mapping[str, Look]) -> list[Chapter]:
    """Render every figure and table, and group results by study."""
    taken: set[str] = set()
    chapters: dict[str, list[StudyResult]] = {}
    for study in studies:
        chapters.setdefault(study.study, []).append(study)
    return [_chapter(name, group, looks, taken) for name, group in chapters.items()]


def terminal_text(study: StudyResult) -> str:
    """Format a result for the terminal: the answer, with the main table of a comparison or a run."""
    findings = study.findings
    if findings.tables and study.study in ("compare", "runs"):
        main = findings.tables[0]
        columns = [column for column in main.columns if column.key != "encoding"]
        remarks = f"not finished yet: {', '.join(study.unfinished)}" if study.unfinished else ""
        table = format_table(replace(main, columns=columns)).aligned()
        return "\n\n".join(filter(None, [table, findings.answer, remarks]))
    on = f" ({study.data.name})" if study.data else ""
    return " ".join(f"{study.study}{on}: {findings.answer}".split())


def title_of(chapters: Sequence[Chapter]) -> str:
    """Return the title of a page."""
    if len(chapters) > 1:
        return "Position encodings compared"
    data = {part.data for part in chapters[0].parts}
    return ": ".join([chapters[0].title, *(data - {""} if len(data) == 1 else ())])


def _chapter(name: str, studies: Sequence[StudyResult], looks: Mapping[str, Look], taken: set[str]) -> Chapter:
    published = [format_table(table, looks) for study in studies for table in study.findings.published]
    return Chapter(
        id=unique(f"study-{slug(name)}", taken),
        title=studies[0].title,
        question=studies[0].question,
        sources=list(dict.fromkeys(source for study in studies for source in study.sources)),
        parts=[_part(study, looks, taken) for study in studies],
        published=[table for at, table in enumerate(published) if table not in published[:at]],
    )


def _part(study: StudyResult, looks: Mapping[str, Look], taken: set[str]) -> Part:
    data, findings = study.data, study.findings
    named = slug(study.study, *([data.name] if data else []))
    section = unique(f"on-{named}", taken)

    def drawing_name(figure: Figure | Pictures) -> str:
        return unique(f"{named}-{slug(figure.name)}", taken)

    return Part(
        id=section,
        study=study,
        data=data.title if data else "",
        about=data_sentence(data) if data else "",
        figures=[_draw(figure, drawing_name(figure), looks) for figure in findings.figures],
        pictures=[Drawing(name := drawing_name(each), each, sheet(each, name)) for each in findings.pictures],
        tables=[format_table(table, looks) for table in findings.tables],
        facts=run_facts(study.run),
    )


def _draw(figure: Figure, name: str, looks: Mapping[str, Look]) -> Drawing:
    drawn = plot(figure, looks)
    numbers = format_table(drawn.table(figure.title), looks) if len(figure.rows) <= LONG else None
    return Drawing(name, figure, svg(drawn, name), drawn, numbers)


def data_sentence(data: DataFacts) -> str:
    """Describe the data and its size."""
    facts = [
        f"{count(data.train)} training examples" if data.train is not None else "",
        f"{count(data.val)} validation examples" if data.val is not None else "",
        f"{count(data.num_classes)} classes" if data.num_classes is not None else "",
        f"inputs of {size(data.input_size)}" if data.input_size else "",
        " × ".join(data.axes),
        f"chance {percent(data.chance)} %" if data.chance is not None else "",
    ]
    listed = ", ".join(filter(None, facts))
    size_of_data = f"{listed[0].upper()}{listed[1:]}." if listed else ""
    skipped = f"Left out because they could not be read: {join_names(data.skipped)}." if data.skipped else ""
    return " ".join(filter(None, [data.description, size_of_data, skipped, f"{data.unread}." if data.unread else ""]))


def unique(wanted: str, taken: set[str]) -> str:
    """Return a name that is not taken, with a number if need be, and take it."""
    names = chain([wanted], (f"{wanted}-{n}" for n in count_from(2)))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return name


def run_facts(run: RunFacts) -> list[tuple[str, str]]:
    """Return the provenance of a run, apart from its command and configuration."""
    seeds = (run.config or {}).get("seeds")
    facts = {
        "Commit": run.commit or "not recorded",
        "torchrope": run.torchrope,
        "Versions": _pairs(run.versions),
        "Seeds": ", ".join(map(str, range(seeds))) if isinstance(seeds, int) and 0 < seeds <= 1000 else None,
        "Machine": _machine(run.machine),
        "Date": run.date,
        "Training": "; ".join(_training(group, run) for group in run.trained),
        "Duration": duration(run.seconds) if run.seconds is not None else None,
    }
    return [(name, fact) for name, fact in facts.items() if fact]


def _training(group: TrainedFacts, run: RunFacts) -> str:
    """Describe training runs of one machine and state of the code, by what differs from the writing of the results."""
    facts = [
        f"{group.runs} run{'s' * (group.runs != 1)}",
        f"at commit {group.commit}" if group.commit not in (None, run.commit) else "",
        f"with {_pairs(group.versions)}" if group.versions not in (None, run.versions) else "",
        f"on {_machine(group.machine)}" if group.machine not in (None, run.machine) else "",
        group.date,
    ]
    return ", ".join(filter(None, facts))


def _pairs(versions: Row | None) -> str:
    return ", ".join(f"{name} {version}" for name, version in (versions or {}).items())


def _machine(machine: Row | None) -> str:
    formats = {"cores": "{} cores", "memory_gb": "{:.0f} GiB memory", "device": "device {}"}
    facts = {name: value for name, value in (machine or {}).items() if value not in (None, "")}
    return ", ".join(formats.get(name, "{}").format(value) for name, value in facts.items())
