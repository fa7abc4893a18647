"""What tests ask of the answers of studies: at most two sentences and 60 words."""

import re

MOST_WORDS, MOST_SENTENCES = 60, 2


def is_short(answer: str) -> bool:
    """Whether an answer is short; dots within names and numbers do not end a sentence."""
    sentences = re.findall(r"[.!?](?=\s|$)", answer)
    return len(answer.split()) <= MOST_WORDS and len(sentences) <= MOST_SENTENCES
