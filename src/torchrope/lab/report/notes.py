"""Say how the results may be read, and how they were made."""

from typing import Any

from torchrope.lab.report.load import Results
from torchrope.lab.report.tables import (
    base_encoding,
    count,
    duration,
    percent,
    resolution_table,
    size,
)

TIED = (
    "A difference smaller than the spread is not a win: such encodings are called tied, whatever the order "
    "they are listed in. The reason stands beside every verdict. Among tied encodings, choose by cost."
)
SIZES = (
    "The model is tested on the same inputs, resampled to sizes it never saw, without further training. "
    "This shows how an encoding behaves outside its training range; fine-tuning at the new size would "
    "usually raise these numbers."
)
MFLOPS = (
    "Matrix products, attention and matrix exponentials are counted; element-wise work (norms, "
    "activations, sines and cosines) is not. An encoding can therefore cost time that this column "
    "does not show."
)


def title(results: Results) -> str:
    """Ask the question that the report answers."""
    return f"Which position encoding for {results['data']['title']}?"


def data_sentences(results: Results) -> list[str]:
    """Describe the data: what it is, how much there is, how it is cut into tokens."""
    data = results["data"]
    described = [data["description"]] if data.get("description") else []
    return [*described, _examples(data), _tokens(data)]


def reading_notes(results: Results) -> list[tuple[str, str]]:
    """Explain every number of the tables, and what it does not say."""
    notes = [
        ("95 % interval", _interval_note(results["data"])),
        ("Spread over seeds", _spread_note(results)),
        ("Best, tied, behind", TIED),
        ("Shuffled", _shuffled_note(results["data"]) if _has(results, "shuffled_top1") else ""),
        ("Other input sizes", SIZES if resolution_table(results) else ""),
        ("MFLOPs", MFLOPS if _has(results, "cost") else ""),
        ("Time and memory", _time_note(results) if _has(results, "cost") else ""),
        ("What this does not show", _limits_note(results["data"])),
    ]
    return [(heading, note) for heading, note in notes if note]


def run_facts(results: Results) -> list[tuple[str, str]]:
    """List what a reader needs to repeat the run, apart from the command and the configuration."""
    run = results["run"]
    facts = [
        ("Commit", run.get("commit") or "not recorded"),
        ("torchrope", run.get("torchrope")),
        ("Versions", _pairs(run.get("versions"))),
        ("Seeds", ", ".join(map(str, run.get("seeds") or []))),
        ("Machine", _machine(run.get("machine") or {})),
        ("Date", run.get("date")),
        ("Duration", duration(run["seconds"]) if run.get("seconds") is not None else None),
    ]
    return [(name, str(fact)) for name, fact in facts if fact]


def _examples(data: dict[str, Any]) -> str:
    return (
        f"{count(data['train'])} examples to train on, {count(data['val'])} held out to validate, "
        f"{count(data['num_classes'])} classes; guessing scores {percent(data['chance'])} %."
    )


def _tokens(data: dict[str, Any]) -> str:
    axes = f" ({' × '.join(data['axes'])})" if data.get("axes") else ""
    patch = f" of {size(data['patch_size'])}" if data.get("patch_size") else ""
    return f"An input of {size(data['input_size'])}{axes} becomes {count(data['tokens'])} tokens{patch}."


def _has(results: Results, part: str) -> bool:
    return any(encoding.get(part) for encoding in results["encodings"])


def _interval_note(data: dict[str, Any]) -> str:
    return (
        f"The {count(data['val'])} validation examples are drawn again many times, with replacement; "
        "95 % of the accuracies so obtained lie inside. It tells how far the number depends on which "
        "examples happened to be held out. It tells nothing about training a second time."
    )


def _spread_note(results: Results) -> str:
    seeds = results["run"].get("seeds") or []
    if len(seeds) > 1:
        return (
            f"Every encoding was trained {len(seeds)} times, from different random starts. The number after "
            "± is how far those trainings lie apart; from so few of them it is itself uncertain."
        )
    return (
        "Every encoding was trained once, so there is none: how much of a gap is the luck of one random "
        "start cannot be told from this run. Before trusting a small gap, run again with several seeds."
    )


def _shuffled_note(data: dict[str, Any]) -> str:
    return (
        "The trained model is tested on inputs whose tokens are put in random order. A large drop means "
        "that it reads where things are. No drop means that it treats the tokens as a bag: if the best "
        "encodings do not drop either, position hardly matters in this data, and neither does the choice. "
        f"Chance is {percent(data['chance'])} %."
    )


def _time_note(results: Results) -> str:
    device = (results["run"].get("machine") or {}).get("device")
    base = base_encoding(results)
    measured = f"Measured on this machine ({device})" if device else "Measured on one machine"
    compared = f", and compared with {base['name']}" if base else ""
    return (
        f"{measured} for one training step of this small model{compared}. In a larger model the encoding "
        "is a smaller part of the whole, so expect other ratios there, and on other hardware."
    )


def _limits_note(data: dict[str, Any]) -> str:
    return (
        "One small model, one set of training settings shared by all encodings, tuned for none of them. "
        f"Larger models, longer training or other data than {data['title']} may order them differently."
    )


def _pairs(versions: dict[str, Any] | None) -> str:
    return ", ".join(f"{name} {version}" for name, version in (versions or {}).items())


def _machine(machine: dict[str, Any]) -> str:
    written = {
        "cores": lambda cores: f"{cores} cores",
        "memory_gb": lambda gigabytes: f"{gigabytes:.0f} GB memory",
        "device": lambda device: f"device {device}",
    }
    return ", ".join(written.get(name, str)(value) for name, value in machine.items() if value not in (None, ""))
