"""Shows long work, such as a warm-up: a bar on a terminal, a few lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_LINES = 4  # arbitrary: without a terminal, say so often how far a stage is


class WarmupDisplay:
    """What ``Service.wait_ready`` and ``evaluate`` call; a context manager.

    Args:
        console: where to.
        title: what is going on.
    """

    def __init__(self, console: Console, title: str = "warming up") -> None:
        self._console = console
        self._title = title
        self._said: tuple[str, int] | None = None
        self._bar = Progress(
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("start", total=None)

    def __call__(self, done: int, total: int, stage: str) -> None:
        """Show that a stage has done ``done`` of ``total`` steps; total 0 is not known yet."""
        self._bar.update(self._task, description=stage, completed=done, total=total or None)
        if self._console.is_terminal:
            return
        # Without the bucket: a line for each of hundreds says less than one now and then.
        step = " ".join(word for word in stage.split() if "=" not in word)
        said = (step, done * _LINES // total if total else 0)
        if said != self._said:
            self._said = said
            self._console.print(f"{self._title}: {step}" + (f" {done}/{total}" if total else ""))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
