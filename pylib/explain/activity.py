"""What the emulator saw a cluster do: accesses to shared memory and their banks, copies in flight, kinds of work."""

from __future__ import annotations

from collections import Counter

from lowbit.passes.origins import Lines
from lowbit.pylib.emulator.observer import BANK_BYTES, BANKS, Access, Copy, Launch
from lowbit.pylib.explain.figures import Bar, Bars, Cell, Figure, Grid, Table, cut
from lowbit.pylib.explain.text import runs

_LINE = BANKS * BANK_BYTES
_MOST_BARS, _MOST_PLACES = 200, 48
KINDS: dict[str, tuple[str, ...]] = {
    "products": ("mma", "wgmma"),
    "copies": ("cp", "prefetch"),
    "device memory": ("ld.global", "st.global", "red", "atom"),
    "shared memory": ("ld.shared", "st.shared", "ldmatrix", "stmatrix"),
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


def activity_figures(seen: Launch, lines: Lines, weights: int) -> list[Figure]:
    """Pictures of a launch.

    lines     the operation of the program that each line of the PTX came from
    weights   numbers of the packed weight that these blocks read, if they read some
    """
    figures: list[Figure] = [instruction_mix(seen, weights)]
    figures += [shared_map(seen)] if seen.touched else []
    figures += [conflicts(seen, lines), *banks(seen)] if seen.accesses else []
    return figures + ([timeline(seen)] if seen.copies else [])


def instruction_mix(seen: Launch, weights: int) -> Table:
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
    columns = ("kind", "warp instructions", "share", *(["of a thread per weight"] if weights else []))
    return Table("Instructions by kind", about, columns, tuple(rows))


def _per(count: int, weights: int) -> tuple[str, ...]:
    return (f"{32 * count / weights:.3f}",) if weights else ()


def shared_map(seen: Launch) -> Bars:
    """The bytes of shared memory that instructions read, write or copy to, by their names."""
    words: dict[str, set[int]] = {}
    for number, touched in seen.touched.items():
        words.setdefault(seen.kernel.instructions[number].name, set()).update(touched)
    end = BANK_BYTES * (max(max(each) for each in words.values()) + 1)
    rows: list[tuple[str, tuple[Bar, ...]]] = []
    about = "Which bytes of a block's shared memory each kind of instruction reads, writes or copies to."
    for hue, (name, touched) in enumerate(words.items()):
        ranges = [(BANK_BYTES * a, BANK_BYTES * b) for a, b in runs(sorted(touched))]
        about += cut(len(ranges), _MOST_BARS, f"stretches of {name}")
        rows.append((name, tuple(Bar(a, b, f"{name}: bytes {a} to {b - 1}", hue) for a, b in ranges[:_MOST_BARS])))
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
    rows = tuple((name, "" if of is None else of, *_turns(access)) for (name, of), access in ordered)
    about = (
        "Shared memory has 32 banks of 4 bytes. A turn brings a word of each; where threads want several of one, "
        "there are more turns: a conflict. Copies by the copy engine and reads of wgmma are not counted."
    )
    columns = ("instruction", "of", "requests of a warp", "turns", "without conflicts", "times as many")
    return Table("Bank conflicts", about, columns, rows)


def _turns(access: Access) -> tuple[str, ...]:
    counts = (f"{count:,}" for count in (access.requests, access.passes, access.least))
    return (*counts, f"{access.passes / access.least:.2f}")


def banks(seen: Launch) -> list[Grid]:
    """A picture for all instructions whose first request goes to the banks alike, those with most conflicts first: the
    thread that each bank serves, turn by turn."""
    alike: dict[tuple[str, str], list[Access]] = {}
    for number, access in seen.accesses.items():
        lanes = [{bank: lane for bank, (_, lane) in turn.items()} for turn in bank_turns(access)]
        alike.setdefault((seen.kernel.instructions[number].name, str(lanes)), []).append(access)
    drawn = [(_times(accesses), name, accesses) for (name, _), accesses in alike.items()]
    return [_banks(name, times, accesses) for times, name, accesses in sorted(drawn, key=lambda each: -each[0])]


def _times(accesses: list[Access]) -> float:
    """How many times as many turns accesses take as without conflicts."""
    return sum(each.passes for each in accesses) / sum(each.least for each in accesses)


def _banks(name: str, times: float, accesses: list[Access]) -> Grid:
    cells = (tuple(_bank(bank, turn.get(bank)) for bank in range(BANKS)) for turn in bank_turns(accesses[0]))
    rows = tuple((f"turn {i}", each) for i, each in enumerate(cells))
    about = (
        f"The first request of {len(accesses)} instruction{'s' * (len(accesses) > 1)}, whose requests take {times:.2f} "
        "times as many turns as without conflicts. A cell has the lane that its bank serves."
    )
    return Grid(f"Banks of {name}", about, "bank", tuple(map(str, range(BANKS))), rows)


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
    for hue, (start, group) in enumerate(sorted(by_place.items())[:_MOST_PLACES]):
        bars = (Bar(c.begin, c.end or last, _flight(seen, c), hue) for c in group)
        rows.append((f"byte {start:,}", tuple(bars)))
    about = (
        "Copies of the first block that are under way, by where in shared memory they go. A step is one instruction of "
        "the threads that take it together. The emulator lets a copy land as late as it may: when it is waited for."
        f"{cut(len(by_place), _MOST_PLACES, 'places')}"
    )
    return Bars("Copies in flight", about, "steps", last, tuple(rows))


def _flight(seen: Launch, copy: Copy) -> str:
    name = seen.kernel.instructions[copy.instruction].name
    end = f"to step {copy.end}" if copy.end else "to the end"
    return f"{name}: {copy.written}, from step {copy.begin} {end}"
