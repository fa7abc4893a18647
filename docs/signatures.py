"""Signatures on the API pages, which a forge shows too: `python docs/signatures.py` writes them.

The table of a page in docs/api names what the page documents. Its block of code has the signatures, and `hooks.py` adds
the docstrings on the site.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import griffe

DOCS = Path(__file__).parent
BLOCK = re.compile(r"^```python\n.*?^```$", re.MULTILINE | re.DOTALL)
PATHS = {"rotate": "rotating.rotate", "ops.skew_exp": "ops.skew_exp.skew_exp"}
"""Public names that are also names of modules."""
OF_MODULES = ("extra_repr", "reset_parameters", "get_extra_state", "set_extra_state")
"""Methods that every module of PyTorch may have."""


def names_of(page: str) -> list[str]:
    """Return the names in the first column of the page's tables, without `torchrope.`."""
    cells = re.findall(r"^\| (`.*?) \| ", page, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]


def path_of(name: str) -> str:
    """Return the path below torchrope by which griffe finds a name."""
    return PATHS.get(name, name)


def with_signatures(page: str, package: griffe.Module) -> str:
    """Return a page with the block of signatures of its names."""
    lines = [line for name in names_of(page) for line in _signatures(name, package)]
    keys = (key for name in names_of(page) for key in _keyword_types(name, package))
    lines += [
        line
        for name, callee in dict(keys).items()
        for line in _wrapped(f"{name}: {', '.join(_keys(callee, name))}", "")
    ]
    block = "\n".join(lines)
    return BLOCK.sub(lambda _: f"```python\n{block}\n```", page, count=1)


def load() -> griffe.Module:
    """Read the package without importing it."""
    package = griffe.load("torchrope", search_paths=[str(DOCS.parent / "src")], resolve_aliases=True)
    assert isinstance(package, griffe.Module)
    return package


def _signatures(name: str, package: griffe.Module) -> Iterator[str]:
    """Yield the lines of a function, or of a class and its documented methods."""
    found = package[path_of(name)]
    target = found.final_target if found.is_alias else found
    if target.is_attribute:
        yield f"{name}: {target.annotation}"
        return
    returns = f" -> {target.returns}" if target.is_function and target.returns is not None else ""
    yield from _wrapped(f"{name}({_parameters(target)}){returns}", "")
    if not target.is_class:
        return
    for method in target.members.values():
        if method.is_alias or method.name.startswith("_") or method.docstring is None:
            continue
        if method.is_function and method.name not in OF_MODULES:
            returns = "" if method.returns is None else f" -> {method.returns}"
            yield from _wrapped(f".{method.name}({_parameters(method)}){returns}", "    ")
        elif method.is_attribute and "property" in method.labels:
            yield f"    .{method.name}: {method.annotation}"


def _keyword_types(name: str, package: griffe.Module) -> Iterator[tuple[str, griffe.Class | griffe.Function]]:
    """Yield the TypedDicts that type keyword arguments of a function, a class or its methods, and who takes them."""
    found = package[path_of(name)]
    target = found.final_target if found.is_alias else found
    for callee in [target, *(target.members.values() if target.is_class else ())]:
        for each in () if callee.is_alias or not (callee.is_class or callee.is_function) else callee.parameters:
            if str(each.annotation).startswith("Unpack["):
                yield str(each.annotation)[len("Unpack[") : -1], callee


def _parameters(callee: griffe.Class | griffe.Function) -> str:
    """Return the parameters of a function, or of a class's constructor, as they are written in a definition."""
    if callee.is_class and any(base.name == "Value" for base in callee.mro()):
        return ", ".join(["*", *_fields(callee)])
    kind, parts, starred = griffe.ParameterKind, [], False
    for each in callee.parameters:
        if each.name in ("self", "cls"):
            continue
        if each.kind is kind.var_keyword and str(each.annotation).startswith("Unpack["):
            parts.append(f"**{each.name}: {str(each.annotation)[len('Unpack[') : -1]}")
            continue
        stars = {kind.var_positional: "*", kind.var_keyword: "**"}.get(each.kind, "")
        if each.kind is kind.keyword_only and not starred:
            parts.append("*")
        starred = starred or each.kind in (kind.keyword_only, kind.var_positional)
        annotation = "" if each.annotation is None else f": {each.annotation}"
        equals = " = " if annotation else "="
        default = "" if stars or each.default is None else f"{equals}{each.default}"
        parts.append(f"{stars}{each.name}{annotation}{default}")
    return ", ".join(parts)


def _fields(value: griffe.Class) -> Iterator[str]:
    """Yield the fields of a `torchrope.tensors.Value`, which its constructor takes by name."""
    for owner in [*reversed(value.mro()), value]:
        for field in owner.members.values():
            if field.is_attribute and field.annotation and "property" not in field.labels and field.name[0] != "_":
                yield f"{field.name}: {field.annotation}" + (f" = {field.value}" if field.value else "")


def _keys(callee: griffe.Class | griffe.Function, name: str) -> Iterator[str]:
    """Yield the keys of a TypedDict, which `**shape: Unpack[...]` stands for, as parameters."""
    found = callee.modules_collection[callee.module.resolve(name)]
    for key, member in (found.final_target if found.is_alias else found).all_members.items():
        if member.is_attribute:
            optional = re.fullmatch(r"NotRequired\[(.*)\]", str(member.annotation))
            yield f"{key}: {optional[1]} = ..." if optional else f"{key}: {member.annotation}"


def _wrapped(signature: str, indent: str) -> list[str]:
    return textwrap.wrap(
        signature,
        110,
        initial_indent=indent,
        subsequent_indent=f"{indent}        ",
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    package = load()
    for path in sorted((DOCS / "api").glob("*.md")):
        path.write_text(with_signatures(path.read_text(encoding="utf-8"), package), encoding="utf-8")
