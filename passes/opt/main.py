"""`lowbit opt`: reads IR, runs the passes named on the command line in their order, prints IR. Our mlir-opt.

    lowbit opt kernel.mlir --lower-tiles --canonicalize
    lowbit opt --select-schedule=tokens=8,num_stages=3 --dump-after-each < matmul.mlir
    lowbit opt kernel.mlir --pass-pipeline='builtin.module(gpu.module(convert-gpu-to-nvvm))'
    lowbit opt invalid.mlir -split-input-file -verify-diagnostics

A pass is one of this project (--list-passes) or any of MLIR; options of ours are --name=a=1,b=2, of MLIR's
--name="a=1 b=2". The IR is verified after every pass. Exit code: 1 after an error or an expectation not met.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lowbit.dialect import ops
from lowbit.dialect.assembly import parse_module, print_module
from lowbit.dialect.bindings import ir, new_context, passmanager
from lowbit.dialect.errors import LowbitError, PassError, reason
from lowbit.passes.opt.diagnostics import Diagnostic, expectations, mismatches, position
from lowbit.passes.opt.options import from_text, options
from lowbit.passes.pipeline import PASSES

_CHUNK_END = re.compile(r"^// -----.*$", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """A pass or pipeline to run; the name is the command line's."""

    name: str
    run: Callable[[ir.Module], None]


@dataclass(frozen=True)
class Opt:
    """The settings for every chunk of the input.

    Steps are run, verified and printed one by one: MLIR's pass manager, which could do this, prints operations of ours
    in the generic form.
    """

    context: ir.Context
    steps: tuple[Step, ...]
    dump_after_each: bool = False
    generic: bool = False
    debug_info: bool = False

    def run(self, chunk: str) -> tuple[str, list[Diagnostic]]:
        """The IR after all steps, "" if one failed, and whatever was reported on the way."""
        with self.context, ir.Location.unknown(), _collect(self.context) as reported:
            try:
                module = parse_module(chunk)
                for step in self.steps:
                    step.run(module)
                    module.operation.verify()
                    if self.dump_after_each:
                        banner = f"// -----// IR Dump After {step.name} //----- //"
                        print(banner, self._print(module), sep="\n", file=sys.stderr)
                result = self._print(module)
            except LowbitError as error:
                reported.append(Diagnostic("error", str(error), *position(getattr(error, "location", None))))
            except ir.MLIRError as error:
                if not _has_error(reported):
                    reported.append(Diagnostic("error", str(error)))
            else:
                return ("" if _has_error(reported) else result), reported
        return "", reported

    def _print(self, module: ir.Module) -> str:
        if self.generic:
            asm = module.operation.get_asm(print_generic_op_form=True, enable_debug_info=self.debug_info)
        else:
            asm = print_module(module, self.debug_info)
        return asm if asm.endswith("\n") else asm + "\n"


@contextmanager
def _collect(context: ir.Context) -> Generator[list[Diagnostic]]:
    """Everything MLIR reports in the body: a list that fills."""
    reported: list[Diagnostic] = []

    def handle(diagnostic: ir.Diagnostic) -> bool:
        reported.append(Diagnostic.from_mlir(diagnostic))
        return True

    context.emit_error_diagnostics = True
    handler = context.attach_diagnostic_handler(handle)
    try:
        yield reported
    finally:
        handler.detach()


def _has_error(reported: Sequence[Diagnostic]) -> bool:
    return any(d.severity == "error" for d in reported)


def parse_step(argument: str) -> Step:
    """The step that `--name`, `--name=options` or `--pass-pipeline=...` stands for; needs a current context.

    Raises PassError for an unknown pass or options that do not fit.
    """
    name, _, value = argument.lstrip("-").partition("=")
    if name in PASSES:
        return Step(name, from_text(PASSES[name], value, f"--{name}").run)

    def manager() -> passmanager.PassManager:  # a pass manager runs once
        if name == "pass-pipeline":
            return passmanager.PassManager.parse(value)
        result = passmanager.PassManager("builtin.module")
        result.add(f"{name}{{{value}}}" if value else name)
        return result

    try:
        manager()
    except ValueError as error:
        reason = str(error)
        if "does not refer to a registered pass" in reason and name != "pass-pipeline":
            raise PassError(f"unknown pass --{name}; {_did_you_mean(name)}--list-passes shows ours") from None
        nest = f"; write --pass-pipeline='builtin.module(func.func({name}))'" if "to nest?" in reason else ""
        raise PassError(f"--{name}: {reason.strip().splitlines()[0]}{nest}") from None
    return Step(name, lambda module: manager().run(module.operation))


def _did_you_mean(name: str) -> str:
    near = difflib.get_close_matches(name, PASSES, n=1)
    return f"did you mean --{near[0]}? " if near else ""


def list_passes() -> str:
    """Every pass of this project: its name, the first line of its docstring, its options."""
    lines: list[str] = []
    for name, cls in sorted(PASSES.items()):
        lines.append(f"--{name}\n    {(cls.__doc__ or '').strip().splitlines()[0]}")
        lines += [f"      {option}" for option in options(cls).values()]
    return "\n".join(lines)


def split_chunks(text: str) -> list[str]:
    """The parts between `// -----` lines, each behind as many empty lines as keep its line numbers."""
    starts = [0, *(m.end() for m in _CHUNK_END.finditer(text))]
    ends = [*(m.start() for m in _CHUNK_END.finditer(text)), len(text)]
    return ["\n" * text.count("\n", 0, start) + text[start:end] for start, end in zip(starts, ends)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return the exit code."""
    flags, source, passes = _parse_arguments(sys.argv[1:] if argv is None else argv)
    if flags.list_passes:
        print(list_passes())
        return 0
    context = new_context()
    context.allow_unregistered_dialects = flags.allow_unregistered_dialect
    ops.register(context)
    try:
        with context:
            steps = _until(flags.stop_after, [parse_step(argument) for argument in passes])
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (LowbitError, OSError, UnicodeDecodeError) as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        return 1

    generic, debug_info = flags.mlir_print_op_generic, flags.mlir_print_debuginfo
    opt = Opt(context, steps, flags.dump_after_each, generic, debug_info)
    results: list[str] = []
    complaints: list[Diagnostic] = []
    for chunk in split_chunks(text) if flags.split_input_file else [text]:
        result, reported = opt.run(chunk)
        results.append(result)
        complaints += mismatches(reported, expectations(chunk)) if flags.verify_diagnostics else reported
    for complaint in complaints:
        print(complaint.render(source, text.split("\n")), file=sys.stderr)
    failed = _has_error(complaints)
    if flags.verify_diagnostics or not failed:
        output = "\n// -----\n".join(results)
        if flags.output == "-":
            sys.stdout.write(output)
        else:
            Path(flags.output).write_text(output, encoding="utf-8")
    return int(failed)


def _until(last: str | None, steps: list[Step]) -> tuple[Step, ...]:
    """The steps up to the pass called `last`."""
    names = [step.name for step in steps]
    if last is not None and last not in names:
        raise PassError(f"--stop-after={last} is not among the passes to run: {', '.join(names) or 'none'}")
    return tuple(steps if last is None else steps[: names.index(last) + 1])


def _parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, str, list[str]]:
    """The flags, the input file, and the rest: the passes in order."""
    parser = argparse.ArgumentParser(
        prog="lowbit opt",
        usage="lowbit opt [FILE] [--PASS[=OPTIONS] ...] [flags]",
        description=__doc__,
        epilog="FILE is - or absent for standard input.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flag = parser.add_argument
    flag("-o", "--output", default="-", metavar="FILE", help="where to write (default: standard output)")
    flag("--split-input-file", action="store_true", help="treat the parts between // ----- lines one by one")
    flag("--verify-diagnostics", action="store_true", help="check errors against expected-error comments")
    flag("--dump-after-each", action="store_true", help="print the IR after every pass on stderr")
    flag("--stop-after", metavar="PASS", help="leave out the passes after this one")
    flag("--list-passes", action="store_true", help="this project's passes with their options")
    flag("--mlir-print-op-generic", action="store_true", help="print the generic form")
    flag("--mlir-print-debuginfo", action="store_true", help="print locations")
    flag("--allow-unregistered-dialect", action="store_true", help="accept operations of unknown dialects")
    # MLIR's tools take -name for --name; argparse would read -one-shot-bufferize as -o ne-shot-bufferize.
    arguments = [f"-{a}" if re.match(r"-[a-z][\w-]", a) else a for a in argv]
    flags, rest = parser.parse_known_args(arguments)
    files = [a for a in rest if a == "-" or not a.startswith("-")]
    if len(files) > 1:
        parser.error(f"one input file at most, not {len(files)}: {' '.join(files)}")
    return flags, (files or ["-"])[0], [a for a in rest if a not in files]


if __name__ == "__main__":
    sys.exit(main())
