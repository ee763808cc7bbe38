"""Blocks of the grid, loops, conditions and pipelines of a tile program."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import cast

from lowbit.dialect import ops
from lowbit.dialect.bindings import scf
from lowbit.dialect.errors import PassError
from lowbit.dialect.types import Reg
from lowbit.passes.builder.scope import Operations, check_values, inside, users_line
from lowbit.passes.builder.tile import Tile
from lowbit.passes.builder.values import Index, Scalar, as_i32, i64, text


class Loop:
    """The inside of `Program.loop`: `index`, `carried` tiles; set `results` to the tiles that go to the next round, as
    many as are carried, of the same types."""

    def __init__(self, index: Scalar, carried: list[Tile]) -> None:
        self.index = index
        self.carried = carried
        self.results: Sequence[Tile] | None = None

    def checked_results(self) -> Sequence[Tile]:
        """The results. Raises PassError unless they were set to tiles like the carried."""
        if self.results is None and self.carried:
            fix = f"set `loop.results` to a list of {len(self.carried)} at the end of its body"
            raise PassError(f"the loop carries {len(self.carried)} tiles, but has no results; {fix}")
        results: Sequence[Tile] = () if self.results is None else self.results
        if (given := _types(results)) != (carried := [tile.reg for tile in self.carried]):
            raise PassError(f"loop.results must be {_words(carried)}, as the loop carries, not {_words(given)}")
        check_values(None, results)
        return results


def _types(results: object) -> list[Reg | str]:
    """Returns what is in a list of tiles; the name of what is no tile, or no list."""
    if not isinstance(results, list | tuple):
        return [f"a {type(results).__name__} without a list"]
    each = cast(Sequence[object], results)
    return [tile.reg if isinstance(tile, Tile) else type(tile).__name__ for tile in each]


def _words(tiles: Sequence[Reg | str]) -> str:
    each = [t if isinstance(t, str) else f"{t.element} {list(t.shape)} in {t.layout}" for t in tiles]
    return ", ".join(each) or "nothing"


class Control(Operations):
    """Operations for control flow: the number of the block, loops and conditions."""

    def block_id(self, axis: int) -> Scalar:
        """Returns the index of this block along axis 0, 1 or 2 of the grid."""
        return Scalar(ops.BlockIdOp(i64(axis)).result)

    def block_count(self, axis: int) -> Scalar:
        """Returns the number of blocks along axis 0, 1 or 2 of the grid."""
        return Scalar(ops.BlockCountOp(i64(axis)).result)

    @contextmanager
    def loop(self, start: Index, steps: Index, carried: Sequence[Tile] = ()) -> Generator[Loop]:
        """for index in start .. start+steps-1. After it, `carried` of the yielded Loop are the final tiles.

        Raises PassError, with the loop's line, where tiles are carried and `results` was not set to as many like them.
        """
        values = [t.value for t in carried]
        for_op = scf.ForOp(as_i32(start), as_i32(start + steps), as_i32(1), values)
        with inside(for_op.body):
            loop = Loop(Scalar(for_op.induction_variable), [Tile(v) for v in for_op.inner_iter_args])
            yield loop
            with users_line("Program.loop"):
                scf.YieldOp([t.value for t in loop.checked_results()])
        loop.carried = [Tile(v) for v in for_op.results]

    @contextmanager
    def when(self, condition: Scalar) -> Generator[None]:
        """Runs the body of the `with` statement only if `condition` holds."""
        if_op = scf.IfOp(condition.value)
        with inside(if_op.then_block):
            yield
            scf.YieldOp([])

    @contextmanager
    def one_thread(self, condition: Scalar) -> Generator[None]:
        """Runs the body in one thread of the block, if `condition` holds, beside products that are under way."""
        op = ops.OneThreadOp(condition.value)
        with inside(op.body.blocks.append()):
            yield

    @contextmanager
    def pipeline(
        self,
        num_stages: int = 1,
        prefetch_limit: int = 0,
        refill: str = "before_mma",
        scope: str = "block",
        warps: int = 1,
        async_proxy: bool = False,
    ) -> Generator[None]:
        """Takes the body, at the head of a loop, as the copies of a round, for which the rest of the loop waits.

        num_stages: rounds that have a stage of the buffers, so that all but one are copied while one computes.
        prefetch_limit: at most so many are copied before `grid_wait` (0: no limit). refill: when a round starts the
        copies of a later one (`Schedule.refill`). scope, warps, async_proxy: the barrier of a round, as in `barrier`.
        """
        op = ops.PipelineOp(i64(num_stages), text(scope), i64(warps))
        op.prefetch_limit = i64(prefetch_limit) if prefetch_limit else None
        op.refill = refill
        op.async_proxy = async_proxy
        with inside(op.copies.blocks.append()):
            yield

    def grid_wait(self) -> None:
        """Waits until the kernel before this one in the stream has ended: what it wrote can be read from here on."""
        ops.GridWaitOp()

    def grid_launch_dependents(self) -> None:
        """Lets the next kernel in the stream start its blocks as soon as there is room, beside this one."""
        ops.GridLaunchOp()
