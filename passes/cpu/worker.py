"""The frame of every host program: `lowbit_run`, which takes numbers of work until none is left (see `task`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowbit.dialect.bindings import arith, func, ir
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.cpu.decode import Isa
from lowbit.passes.cpu.task import ENTRY, WORDS, Needs
from lowbit.passes.cpu.vector_ops import (
    Value,
    add,
    at,
    divmod_,
    fetch_add,
    i64,
    less,
    load,
    load_acquire,
    loop_while,
    mul,
    pause,
    pointer,
    when,
)

Ranged = Callable[[Value, Value], None]
"""Emits the code for the row blocks from the first up to the second."""


class Task:
    """The words of a task inside the function. more: names of those behind `WORDS`, but for a weight's."""

    def __init__(self, base: Value, needs: Needs, more: Sequence[str] = ()) -> None:
        self._base, self._needs, self._words = base, needs, (*WORDS, *more)

    def address(self, word: str) -> Value:
        """Where a word is."""
        return at(self._base, byte=8 * self._words.index(word))

    def integer(self, word: str) -> Value:
        return load(i64(0).type, self.address(word))

    def array(self, word: str) -> Value:
        """The address that a word holds."""
        return load(pointer(), self.address(word))

    def weight(self, spec: MatmulSpec) -> list[Value]:
        """The addresses of `spec.call_operands`."""
        return [load(pointer(), at(self._base, byte=8 * (len(WORDS) + i))) for i in range(len(spec.call_operands))]

    def x_scales(self, spec: MatmulSpec) -> Value:
        """The address behind them, of the scales of rows of x [m] in f32."""
        return load(pointer(), at(self._base, byte=8 * (len(WORDS) + len(spec.call_operands))))

    def row(self, token: Value) -> Value:
        """A token's row of the prepared activation."""
        return at(self.array("scratch"), mul(token, self._needs.per_token))

    def share(self, worker: Value) -> Value:
        """A thread's own scratch memory."""
        s = self._needs
        rounded = add(self.integer("m"), s.block - 1)
        tokens = mul(divmod_(rounded, s.block)[0], s.block)
        nbytes = add(mul(tokens, s.per_worker_token), s.per_worker)
        return at(at(self.array("scratch"), mul(tokens, s.per_token)), arith.muli(worker, nbytes))


def define(emit: Callable[[Value], None]) -> None:
    """Define `lowbit_run`; `emit` writes what it does, and takes its argument."""
    op = func.FuncOp(ENTRY, ([pointer()], []))
    block = op.add_entry_block()
    with ir.InsertionPoint(block):
        end = func.ReturnOp([])
    with ir.InsertionPoint(end):
        emit(block.arguments[0])


def run_function(
    needs: Needs, blocks: int, isa: Isa, emit: Callable[[Task], tuple[Callable[[Value], None] | None, Ranged]]
) -> None:
    """Define `lowbit_run` for a weight of so many row blocks.

    `emit` writes what is done once per thread and returns the code of the pieces (None where there are none; it
    takes a token) and of the parts.
    """

    def run(base: Value) -> None:
        task = Task(base, needs)
        _take_numbers(task, blocks, isa, *emit(task))

    define(run)


def take_pieces(task: Task, prepare: Callable[[Value], None]) -> Value:
    """Does pieces until none is left; returns the number behind them that it took."""
    pieces = task.integer("m")
    with loop_while(_take(task), lambda n: less(n, pieces)) as piece:
        prepare(piece.carried[0])
        fetch_add(task.address("done"), 1)
        piece.carried = [_take(task)]
    return piece.carried[0]


def wait_until_done(place: Value, numbers: Value, isa: Isa) -> None:
    """Waits until so many numbers are counted in a task's word `done`."""
    with loop_while(load_acquire(place), lambda done: less(done, numbers)) as waiting:
        if isa != "generic":
            pause()
        waiting.carried = [load_acquire(place)]


def _take(task: Task) -> Value:
    return fetch_add(task.address("ticket"), 1)


def _take_numbers(task: Task, blocks: int, isa: Isa, prepare: Callable[[Value], None] | None, compute: Ranged) -> None:
    pieces, parts = task.integer("m") if prepare else i64(0), task.integer("parts")
    end, done = arith.addi(pieces, parts), task.address("done")
    number = take_pieces(task, prepare) if prepare else _take(task)
    with when(less(number, end)):
        if prepare:
            wait_until_done(done, pieces, isa)
        with loop_while(number, lambda n: less(n, end)) as part:
            first = arith.subi(part.carried[0], pieces)
            compute(*(arith.divui(mul(n, blocks), parts) for n in (first, add(first, 1))))
            fetch_add(done, 1)
            part.carried = [_take(task)]


def worker_number(task: Task) -> Value:
    """Numbers the threads that take part, from 0 on."""
    return fetch_add(task.address("workers"), 1)
