"""One operation as text, in MLIR's generic form and in ours, which says the same in fewer words.

    %0 = "lowbit.load"(%x, %i, %j) {boundary = ["none", "skip"], operandSegmentSizes = array<i32: 1, 2>}
         : (!lowbit.shared<..>, i32, i32) -> !lowbit.reg<..>
    %0 = lowbit.load %x[%i, %j skip] : !lowbit.shared<..> -> !lowbit.reg<..>

One rule serves every operation, and both directions; it follows from the declaration of the operation's class:

- Operands come in the order of the declaration, but offsets in square brackets behind the memory that they are in. An
  offset is followed by its word of `boundary`, unless that is "none".
- The name of a symbol comes first, with @, and then the arguments of the region, if it has any; their names are the
  `params`.
- Attributes follow in braces, in front of a region behind the word `attributes`. Those that have the default of the
  declaration are left out; the type of an integer is i64.
- Types follow behind a colon, but for those that the declaration fixes. Of several equal ones there is one.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from lowbit.dialect.assembly.declared import BOUNDARY, OFFSETS, PARAMS, SYMBOL, Declaration
from lowbit.dialect.assembly.tokens import Reader, SyntaxFault

SEGMENTS = "operandSegmentSizes"
_NUMBER = re.compile(r'("(?:[^"\\]|\\.)*")|\b(\d+) : i64\b|\b0x([0-9A-F]{8})(?= : f32\b)')
_IDENTIFIER = re.compile(r"[A-Za-z_][\w$.]*")


@dataclass
class Region:
    """A region of one block: the text between the parentheses of its arguments, if it has any, and its body."""

    arguments: str | None
    body: Reader

    @property
    def names(self) -> list[str]:
        """The names of the arguments."""
        text = self.arguments or ""
        return [token.removeprefix("%") for token in re.findall(r"%[\w$.\-]+(?=\s*:)", text)]


@dataclass
class Statement:
    """An operation's parts, as text. `types` are those of operands, then of results, of the generic form."""

    declaration: Declaration
    operands: list[str]
    attributes: dict[str, str | None]
    regions: list[Region]
    operand_types: list[str]
    result_types: list[str]


def plain(text: str) -> str:
    """A text of attributes or types without `: i64`, which is what an integer is without a type, and with f32 numbers
    in decimal digits, which MLIR writes only where six of them are enough."""
    return _NUMBER.sub(lambda m: m[1] or m[2] or _decimal(m[3]), text)


def _decimal(bits: str) -> str:
    """The f32 number of these bits as MLIR reads it, which is exact; infinities and NaNs have no other form."""
    (value,) = struct.unpack(">f", bytes.fromhex(bits))
    if not math.isfinite(value):
        return f"0x{bits}"
    mantissa, _, exponent = repr(value).partition("e")
    return mantissa + ("" if "." in mantissa else ".0") + (f"e{exponent}" if exponent else "")


def read_dict(reader: Reader) -> dict[str, str | None]:
    """The entries of a dictionary of attributes; None for a unit attribute."""
    found: dict[str, str | None] = {}
    for entry in reader.parts():
        name = entry.take().text
        found[name] = entry.span if entry.skip("=") else None
    return found


def write_dict(attributes: dict[str, str | None]) -> str:
    """A dictionary of attributes between braces; nothing if it is empty."""
    entries = [name if value is None else f"{name} = {value}" for name, value in attributes.items()]
    return f"{{{', '.join(entries)}}}" if entries else ""


def read_generic(declaration: Declaration, reader: Reader) -> Statement:
    """The statement whose name has just been read in the generic form."""
    operands = [part.span for part in reader.group().parts()]
    regions = [_generic_region(part) for part in reader.group().parts()] if reader.sees("(") else []
    attributes = read_dict(reader.group()) if reader.sees("{") else {}
    reader.expect(":")
    inputs = [part.span for part in reader.group().parts()]
    reader.expect("->")
    results = [part.span for part in reader.group().parts()] if reader.sees("(") else [reader.type()]
    return Statement(declaration, operands, attributes, regions, inputs, results)


def _generic_region(reader: Reader) -> Region:
    inner = reader.group()
    if not inner.next.text.startswith("^"):
        return Region(None, inner)
    inner.take()
    arguments = inner.group().span if inner.sees("(") else None
    inner.expect(":")
    return Region(arguments, inner)


def has_own_form(statement: Statement) -> bool:
    """Whether our form says all of a statement, which it does unless the verifier would refuse it in any case."""
    declared, count = statement.declaration, len(statement.operands)
    single = count == len(declared.singles)
    names = [*declared.operands(count), *declared.results]
    types = statement.operand_types + statement.result_types
    return (
        (single or (declared.variadic is not None and count > len(declared.singles)))
        and len(types) == len(names)
        and all(declared.fixed.get(name, type_) == type_ for name, type_ in zip(names, types))
        and statement.attributes.get(SEGMENTS) == declared.segments(count)
        and len(statement.regions) == declared.has_region
        and all(name in statement.attributes for name in declared.defaults)
        and (not declared.has_boundary or BOUNDARY in statement.attributes)
    )


def own_head(statement: Statement) -> str:
    """Our form of a statement as far as its region, or all of it but for types if it has none."""
    declared = statement.declaration
    attributes = {name: v and plain(v) for name, v in statement.attributes.items() if name != SEGMENTS}
    words = [declared.name, _symbol(declared, attributes, statement.regions)]
    words.append(", ".join(_own_operands(statement, attributes)))
    for name, default in declared.defaults.items():
        if attributes[name] == plain(default):
            del attributes[name]
    if attributes and declared.has_region:
        words.append("attributes")
    words.append(write_dict(attributes))
    return " ".join(filter(None, words))


def _symbol(declared: Declaration, attributes: dict[str, str | None], regions: list[Region]) -> str:
    """Takes the symbol's name and the names of parameters from the attributes, and writes them."""
    name = attributes.get(SYMBOL) or ""
    symbol = ""
    if declared.has_symbol and _IDENTIFIER.fullmatch(name.strip('"')):
        symbol = "@" + name.strip('"')
        del attributes[SYMBOL]
    names = [name for region in regions for name in region.names]
    if declared.has_params and attributes.get(PARAMS) == _strings(names):
        del attributes[PARAMS]
    arguments = [region.arguments for region in regions if region.arguments is not None]
    return symbol + "".join(f"({text})" for text in arguments)


def _strings(words: list[str]) -> str:
    quoted = [f'"{word}"' for word in words]
    return f"[{', '.join(quoted)}]"


def _own_operands(statement: Statement, attributes: dict[str, str | None]) -> list[str]:
    """Writes operands, and takes the boundary that they show from the attributes."""
    declared, count = statement.declaration, len(statement.operands)
    named = list(zip(declared.operands(count), statement.operands))
    if declared.addressed is None:
        return [text for _, text in named]
    offsets = [text for name, text in named if name == OFFSETS]
    words = re.findall(r'"([a-z]+)"', attributes.get(BOUNDARY) or "")
    if declared.has_boundary and len(words) == len(offsets) and attributes[BOUNDARY] == _strings(words):
        del attributes[BOUNDARY]
        offsets = [text if word == "none" else f"{text} {word}" for text, word in zip(offsets, words)]
    bracket = {declared.addressed: f"[{', '.join(offsets)}]"}
    return [text + bracket.get(name, "") for name, text in named if name != OFFSETS]


def own_types(statement: Statement) -> str:
    """The types of our form, with the colon."""
    inputs, results = _open_types(statement)
    if inputs and len(inputs + results) > 1 and len({*inputs, *results}) == 1:
        inputs, results = inputs[:1], []
    both = _arrow(inputs, results)
    return f" : {both}" if both else ""


def _arrow(inputs: list[str], results: list[str]) -> str:
    return " -> ".join(", ".join(part) for part in (inputs, results) if part)


def _open_types(statement: Statement) -> tuple[list[str], list[str]]:
    """The types of operands and of results that the declaration leaves open."""
    declared = statement.declaration
    operands = declared.operands(len(statement.operands))
    inputs = [plain(t) for name, t in zip(operands, statement.operand_types) if name not in declared.fixed]
    results = [plain(t) for name, t in zip(declared.results, statement.result_types) if name not in declared.fixed]
    return inputs, results


def read_own(declaration: Declaration, reader: Reader) -> Statement:
    """The statement whose name has just been read in our form."""
    attributes: dict[str, str | None] = {}
    if declaration.has_symbol and reader.next.text.startswith("@"):
        attributes[SYMBOL] = f'"{reader.take().text[1:]}"'
    arguments = reader.group().span if declaration.has_region and reader.sees("(") else None
    operands = _read_operands(declaration, reader, attributes)
    if (reader.skip("attributes") or not declaration.has_region) and reader.sees("{"):
        attributes |= read_dict(reader.group())
    regions: list[Region] = []
    if declaration.has_region:
        if not reader.sees("{"):
            reader.fail(f"{declaration.name}: expected a region in braces")
        regions.append(Region(arguments, reader.group()))
        if declaration.has_params:
            attributes.setdefault(PARAMS, _strings(regions[0].names))
    for name, default in declaration.defaults.items():
        attributes.setdefault(name, default)
    if (segments := declaration.segments(len(operands))) is not None:
        attributes.setdefault(SEGMENTS, segments)
    return Statement(declaration, operands, attributes, regions, *_read_types(declaration, reader, len(operands)))


def _read_operands(declared: Declaration, reader: Reader, attributes: dict[str, str | None]) -> list[str]:
    """Reads operands, in the order of the generic form, and puts the boundary that they show among the attributes."""
    singles: list[str] = []
    offsets: list[str] = []
    words: list[str] = []
    none = not declared.singles and declared.variadic is None  # what comes next is another operation's result
    while reader.next.text.startswith("%") and not none:
        singles.append(reader.take().text)
        if declared.addressed is not None and reader.sees("["):
            for part in reader.group().parts():
                offsets.append(part.take().text)
                words.append(part.span or "none")
        if not reader.skip(","):
            break
    if declared.has_boundary:
        attributes[BOUNDARY] = _strings(words)
    least = len(declared.singles)
    if len(singles) < least or (len(singles) > least and (declared.variadic is None or declared.addressed)):
        expected = ", ".join(declared.operands(least + (declared.variadic is not None)))
        reader.fail(f"{declared.name}: expected operands {expected or 'none'}; {len(singles)} are there")
    return [*singles[: declared.before], *offsets, *singles[declared.before :]]


def _read_types(declared: Declaration, reader: Reader, count: int) -> tuple[list[str], list[str]]:
    """The types of operands and results: those that are written, and those that the declaration fixes."""
    operands = declared.operands(count)
    open_inputs = [name for name in operands if name not in declared.fixed]
    open_results = [name for name in declared.results if name not in declared.fixed]
    if not open_inputs and not open_results:
        return _in_place(declared, operands, []), _in_place(declared, declared.results, [])
    place = reader.next
    if not reader.skip(":"):
        reader.fail(f"{declared.name}: expected ':' and types")
    before, after = reader.types(), reader.types() if reader.skip("->") else []
    if not after and not open_inputs:
        before, after = [], before
    elif not after and len(before) == 1:
        before, after = before * len(open_inputs), before * len(open_results)
    if (len(before), len(after)) != (len(open_inputs), len(open_results)):
        names, got = _arrow(open_inputs, open_results), _arrow(before, after)
        raise SyntaxFault(f"{declared.name}: expected the types of {names}, got {got}", place.start)
    return _in_place(declared, operands, before), _in_place(declared, declared.results, after)


def _in_place(declared: Declaration, names: Sequence[str], types: list[str]) -> list[str]:
    """A type for every name: the fixed one, or the next of those written."""
    rest = iter(types)
    return [declared.fixed[name] if name in declared.fixed else next(rest) for name in names]


def generic_head(statement: Statement) -> str:
    """The generic form as far as its region, or as far as its attributes."""
    return f'"{statement.declaration.name}"({", ".join(statement.operands)})'


def generic_tail(statement: Statement) -> str:
    """The generic form from its attributes on."""
    attributes = write_dict(statement.attributes)
    inputs, results = (", ".join(types) for types in (statement.operand_types, statement.result_types))
    return f" {attributes}".rstrip() + f" : ({inputs}) -> ({results})"
