"""Runs `lowbit opt` on damaged programs, in a process of its own, which a crash may end.

    python pytests/compiler/opt_mutations.py FIRST LAST

A damaged program is a chunk of a file in lit_tests with one to three of its words, numbers or lines changed, such that
the parser takes it nevertheless; its number decides which. It goes through the passes of its file, or through all that
lower a tile program. On standard output a line says which program is next, and another one what became of it: "ok",
"refused" by a pass with errors that `lowbit opt` reports, or an exception that it lets through. A program may take so
much CPU time and memory, and no more.
"""

from __future__ import annotations

import random
import re
import resource
import shlex
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

from lowbit.dialect import ops
from lowbit.dialect.bindings import ir, new_context
from lowbit.passes.opt.main import Opt, parse_step, split_chunks

CPU_SECONDS, MEMORY = 60, 6 << 30
LOWERING = ["--pipeline-copies", "--lower-tiles=target=sm_90a", "--lower-dequant", "--lower-to-llvm"]
NUMBERS = ["0", "1", "-1", "2", "3", "7", "65", "2147483647", "4294967296", str(2**63 - 1), str(-(2**63))]
_WORDS = re.compile(r'"[^"]*"|[!#%@^]?[A-Za-z_][\w.$-]*|\d+|->|[^\s\w]|\s+')


@cache
def programs(folder: Path) -> list[tuple[list[str], str]]:
    """Returns the passes and the text of all chunks of the folder's files, without comments."""
    found: list[tuple[list[str], str]] = []
    for file in sorted(folder.rglob("*.mlir")):
        text = file.read_text()
        run = re.search(r"%lowbit-opt %s (.*?)(?:2>&1|\||$)", text, re.MULTILINE)
        passes = [a for a in shlex.split(run[1]) if not a.startswith(("--split", "--verify", "--stop"))] if run else []
        for chunk in split_chunks(text):
            program = re.sub(r"//.*", "", chunk).strip()
            if program:
                found += [(passes, program), (LOWERING, program)]
    return found


def mutate(program: str, rng: random.Random) -> str:
    """Returns the program with one to three changes."""
    words = _WORDS.findall(program)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = [i for i, word in enumerate(words) if not word.isspace()]
        rng.choice(CHANGES)(words, places, rng)
    return "".join(words)


def _number(words: list[str], places: list[int], rng: random.Random) -> None:
    numbers = [i for i in places if words[i].isdigit()]
    if numbers:
        i = rng.choice(numbers)
        near = [str(int(words[i]) + d) for d in (-1, 1)] + [str(2 * int(words[i]))]
        words[i] = rng.choice(NUMBERS + 3 * near)


def _replace(words: list[str], places: list[int], rng: random.Random) -> None:
    """A word becomes another one of its kind: a name, a type or attribute, a value, a text."""
    i = rng.choice(places)
    alike = [words[j] for j in places if words[j][0] == words[i][0] or (words[j].isalpha() and words[i].isalpha())]
    words[i] = rng.choice(alike)


def _delete(words: list[str], places: list[int], rng: random.Random) -> None:
    words[rng.choice(places)] = " "


def _repeat(words: list[str], places: list[int], rng: random.Random) -> None:
    i = rng.choice(places)
    words[i] = f"{words[i]} {words[i]}"


def _swap(words: list[str], places: list[int], rng: random.Random) -> None:
    i, j = rng.choice(places), rng.choice(places)
    words[i], words[j] = words[j], words[i]


def _line(words: list[str], places: list[int], rng: random.Random) -> None:
    """A line is left out, or changes places with another."""
    lines = "".join(words).split("\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[i], lines[j] = ("", lines[j]) if rng.random() < 0.5 else (lines[j], lines[i])
    words[:] = _WORDS.findall("\n".join(lines))


Change = Callable[[list[str], list[int], random.Random], None]
CHANGES: list[Change] = [*[_number] * 4, *[_replace] * 4, _delete, _repeat, _swap, _line]


def outcome(number: int, folder: Path) -> str:
    """Returns what `lowbit opt` makes of the damaged program of this number."""
    rng = random.Random(number)
    context = new_context()
    ops.register(context)
    try:
        passes, program = _parsed(context, rng, programs(folder))
        with context:
            steps = tuple(parse_step(argument) for argument in passes)
        return "refused" if _refuses(Opt(context, steps), program) else "ok"
    except Exception as error:  # a traceback is what users would see
        return f"{type(error).__name__}: {error}".split("\n")[0]


def _parsed(context: ir.Context, rng: random.Random, sources: list[tuple[list[str], str]]) -> tuple[list[str], str]:
    """Returns the passes and the text of the first damaged program that the parser takes."""
    while True:
        passes, program = rng.choice(sources)
        program = mutate(program, rng)
        if not _refuses(Opt(context, ()), program):
            return passes, program


def _refuses(opt: Opt, program: str) -> bool:
    return any(diagnostic.severity == "error" for diagnostic in opt.run(program)[1])


def main(first: int, last: int) -> None:
    """Run damaged programs."""
    warnings.simplefilter("ignore")
    folder = Path(__file__).resolve().parents[2] / "lit_tests"
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in range(first, last):
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + CPU_SECONDS, -1))
        print(number, flush=True)
        print(outcome(number, folder), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
