"""Insert text between markers of a Markdown file."""


def insert_between_markers(text: str, name: str, block: str) -> str:
    """Replace the text between `<!-- name:begin -->` and `<!-- name:end -->` by `block`.

    Raises:
        ValueError: the text does not contain each marker once, begin before end.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        counts = f"{text.count(begin)} begin and {text.count(end)} end"
        raise ValueError(f"the text must contain {begin} and then {end} once each, got {counts}")
    before, after = text.split(begin)[0], text.split(end)[1]
    return f"{before}{begin}\n{block.strip()}\n{end}{after}"
