"""Fill the report's templates; every value is escaped."""

import re
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from torchrope_lab.report.tables import escape_markdown


def shipped(name: str) -> str:
    """Return the text of a file beside this module."""
    return (files("torchrope_lab.report") / name).read_text(encoding="utf-8")


def fill(template: str, /, **values: Any) -> str:
    """Fill a template of HTML or SVG."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return environment.from_string(shipped(template)).render(values)


def fill_markdown(template: str, /, **values: Any) -> str:
    """Fill a template of Markdown; blank lines in a row become one."""
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else escape_markdown(str(value)),
    )  # fmt: skip
    return re.sub(r"\n{3,}", "\n\n", environment.from_string(shipped(template)).render(values)).strip() + "\n"
