"""What the emulator saw a cluster do: accesses to shared memory and their banks, copies in flight, kinds of work."""

from __future__ import annotations

from collections import Counter

from lowbit.passes.origins import Lines
from lowbit.pylib.emulator.observer import BANK_BYTES, BANKS, Access, Copy, Launch
from lowbit.pylib.explain.figures import Bar, Bars, Cell, Figure, Grid, Table
from lowbit.pylib.explain.text import runs

_LINE = BANKS * BANK_BYTES
_MOST_ROWS = 24
KINDS: dict[str, tuple[str, ...]] = {
    "products": ("mma", "wgmma"),
    "copies": ("cp", "prefetch", "ldmatrix"),
    "device memory": ("ld.global", "st.global", "red", "atom"),
    "shared memory": ("ld.shared", "st.shared", "stmatrix"),
    "parameters": ("ld.param",),
    "synchronization": ("bar", "barrier", "mbarrier", "fence", "membar", "griddepcontrol", "elect"),
    "bits": ("lop3", "shf", "shl", "shr", "and", "or", "xor", "not", "prmt", "bfe", "bfi", "mov", "cvta", "selp"),
    "control": ("bra", "setp", "ret", "exit", "brx"),
}
"""Kinds of instructions by how their names begin; others are arithmetic."""


def kind_of(name: str) -> str:
    """The kind of a PTX instruction."""
    starts = (kind for kind, names in KINDS.items() if any(f"{name}.".startswith(f"{each}.") for each in names))
    return next(starts, "arithmetic")


def activity_figures(seen: Launch, lines: Lines, weights: float | None) -> list[Figure]:
    """Pictures of a launch.

    lines     the operation of the program that each line of the PTX came from
    weights   numbers of the weight that these blocks multiplied, if that is known
    """
    figures: list[Figure] = [instruction_mix(seen, weights)]
    if seen.accesses:
        figures += [shared_map(seen), conflicts(seen, lines), banks(seen)]
    return figures + ([timeline(seen)] if seen.copies else [])


def instruction_mix(seen: Launch, weights: float | None) -> Table:
    """Warp instructions that ran, by kind."""
    found: Counter[str] = Counter()
    for number, count in seen.counts.items():
        found[kind_of(seen.kernel.instructions[number].name)] += count
    total = sum(found.values())
    rows = [(kind, f"{count:,}", f"{count / total:.1%}", *_per(count, weights)) for kind, count in found.most_common()]
    rows.append(("all", f"{total:,}", "100.0%", *_per(total, weights)))
    whole = "" if seen.whole else ", as far as the emulator was watched"
    first = f"the first cluster of {seen.cluster} blocks" if seen.cluster > 1 else "the first block"
    about = f"What {first} executed in the emulator{whole or (', up to the fault' * bool(seen.fault))}."
    columns = ("kind", "warp instructions", "share", *(["per weight and thread"] if weights else []))
    return Table("Instructions by kind", about, columns, tuple(rows))


def _per(count: int, weights: float | None) -> tuple[str, ...]:
    return (f"{32 * count / weights:.3f}",) if weights else ()


def shared_map(seen: Launch) -> Bars:
    """Which bytes of shared memory instructions touched, by their names."""
    words: dict[str, set[int]] = {}
    for number, access in seen.accesses.items():
        words.setdefault(seen.kernel.instructions[number].name, set()).update(access.words)
    for copy in seen.copies:
        name = seen.kernel.instructions[copy.instruction].name
        words.setdefault(name, set()).update(range(copy.start // BANK_BYTES, (copy.start + copy.bytes) // BANK_BYTES))
    end = BANK_BYTES * (max(max(each) for each in words.values()) + 1)
    rows = []
    for hue, (name, touched) in enumerate(words.items()):
        ranges = [(BANK_BYTES * a, BANK_BYTES * b) for a, b in runs(sorted(touched))]
        rows.append((name, tuple(Bar(a, b, f"{name}: bytes {a} to {b - 1}", hue) for a, b in ranges[:200])))
    about = "Which bytes of a block's shared memory each kind of instruction touched."
    return Bars("Map of shared memory", about, "bytes", end, tuple(rows))


def conflicts(seen: Launch, lines: Lines) -> Table:
    """Turns that accesses to shared memory took, and the fewest that they could take, by operation of the program."""
    together: dict[tuple[str, int | None], Access] = {}
    for number, access in seen.accesses.items():
        instruction = seen.kernel.instructions[number]
        total = together.setdefault((instruction.name, lines[instruction.line - 1]), Access())
        total.requests += access.requests
        total.passes += access.passes
        total.least += access.least
    ordered = sorted(together.items(), key=lambda item: -item[1].passes)
    rows = [(name, "" if of is None else f"operation {of}", *_turns(access)) for (name, of), access in ordered]
    about = (
        "Shared memory has 32 banks of 4 bytes. A turn brings a word of each; where threads want several of one, "
        "there are more turns: a conflict. Copies by the copy engine and reads of wgmma are not counted."
    )
    columns = ("instruction", "of", "requests of a warp", "turns", "without conflicts", "times as many")
    return Table("Bank conflicts", about, columns, tuple(rows[:_MOST_ROWS]))


def _turns(access: Access) -> tuple[str, ...]:
    counts = (f"{count:,}" for count in (access.requests, access.passes, access.least))
    return (*counts, f"{access.passes / access.least:.2f}")


def banks(seen: Launch) -> Grid:
    """The first request of the instruction with the most conflicts: the thread that each bank serves, turn by turn."""
    number, access = max(seen.accesses.items(), key=lambda item: (item[1].passes / item[1].least, item[1].passes))
    name = seen.kernel.instructions[number].name
    turns = bank_turns(access)
    cells = (tuple(_bank(bank, turn.get(bank)) for bank in range(BANKS)) for turn in turns)
    rows = tuple((f"turn {i}", each) for i, each in enumerate(cells))
    times = f"{access.passes / access.least:.2f} times as many turns as without conflicts"
    about = f"A warp's first request by {name}: {times}. A cell has the lane that its bank serves."
    return Grid("Banks of the access with the most conflicts", about, "bank", tuple(map(str, range(BANKS))), rows)


def bank_turns(access: Access) -> list[dict[int, tuple[int, int]]]:
    """The turns of an access's first request: by bank the word and the thread of the request that gets it."""
    turns: list[dict[int, tuple[int, int]]] = []
    offset, size = access.first
    together = max(1, _LINE // max(size, BANK_BYTES))
    for first in range(0, len(offset), together):
        by_bank: dict[int, dict[int, int]] = {}
        for lane, at in enumerate(offset[first : first + together], first):
            for word in range(at // BANK_BYTES, at // BANK_BYTES + max(1, size // BANK_BYTES)):
                by_bank.setdefault(word % BANKS, {}).setdefault(word, lane)
        turns += [
            {bank: list(words.items())[turn] for bank, words in by_bank.items() if turn < len(words)}
            for turn in range(max(map(len, by_bank.values())))
        ]
    return turns


def _bank(bank: int, held: tuple[int, int] | None) -> Cell:
    if held is None:
        return Cell("", f"bank {bank} is idle")
    word, lane = held
    first, lane = BANK_BYTES * word, lane % 32
    return Cell(str(lane), f"bank {bank}: bytes {first} to {first + BANK_BYTES - 1} for lane {lane}", lane)


def timeline(seen: Launch) -> Bars:
    """Copies to shared memory of the first block, from issue to the step in which they were waited for."""
    copies = [copy for copy in seen.copies if copy.block == 0]
    by_place: dict[int, list[Copy]] = {}
    for copy in copies:
        by_place.setdefault(copy.start, []).append(copy)
    last = max(event.time for event in seen.events) + 1
    rows: list[tuple[str, tuple[Bar, ...]]] = []
    for hue, (start, group) in enumerate(sorted(by_place.items())[: 2 * _MOST_ROWS]):
        bars = (Bar(c.begin, c.end or last, _flight(seen, c), hue) for c in group)
        rows.append((f"byte {start:,}", tuple(bars)))
    about = (
        "Copies that are under way, by where in shared memory they go. A step is one instruction of the threads that "
        "take it together. The emulator lets a copy land as late as it may: when it is waited for."
    )
    return Bars("Copies in flight", about, "steps", last, tuple(rows))


def _flight(seen: Launch, copy: Copy) -> str:
    name = seen.kernel.instructions[copy.instruction].name
    end = f"to step {copy.end}" if copy.end else "to the end"
    return f"{name}: {copy.bytes} bytes to byte {copy.start}, from step {copy.begin} {end}"
