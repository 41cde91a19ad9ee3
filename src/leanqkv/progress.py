"""Progress of long work: a bar with the time left on a terminal, a line every 15 seconds in a log.

Both go to standard error, so that standard output holds results alone.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

LOG_SECONDS = 15.0
# With several processes, the first one reports. `console` is for results, `terminal` for progress and remarks.
console = Console(quiet=os.environ.get("RANK", "0") != "0")
terminal = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")


class Bar:
    """One line of progress: what is being done, how much of it is done, and of how much."""

    def __init__(self, bars: Progress, description: str, in_bytes: bool):
        self._bars, self.description, self._in_bytes = bars, description, in_bytes
        self._task = bars.add_task(description, total=None)
        self.started, self.done, self.total = time.monotonic(), 0, 0

    def __call__(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        self._bars.update(self._task, completed=done, total=total)

    def describe(self, description: str) -> None:
        """Say what is being done now."""
        self.description = description
        self._bars.update(self._task, description=description)

    def start(self, description: str) -> None:
        """Begin another phase, with a count and a clock of its own."""
        self._bars.remove_task(self._task)
        self._task = self._bars.add_task(description, total=None)
        self.description, self.started, self.done, self.total = description, time.monotonic(), 0, 0

    def line(self) -> str:
        """The same for a log."""
        elapsed = time.monotonic() - self.started
        if not self.total:
            return f"{self.description}, {_clock(elapsed)} so far"
        left = f", about {_clock(elapsed / self.done * (self.total - self.done))} left" if self.done else ""
        if self._in_bytes:
            return f"{self.description}: {self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB{left}"
        return f"{self.description}: {self.done:,} of {self.total:,}{left}"


@contextmanager
def progress_bar(description: str, *, in_bytes: bool = False, log_only: bool = False) -> Iterator[Bar]:
    """Show one bar while the body runs; call it with what is done and the total, once that is known.

    With `log_only` there is no bar on a terminal, for a body that draws its own.
    """
    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), amount, TimeRemainingColumn(compact=True))
    with Progress(*columns, console=terminal, transient=True, disable=log_only or not terminal.is_terminal) as bars:
        bar = Bar(bars, description, in_bytes)
        with _log_lines(lambda: [bar.line()]):
            yield bar


class TrainingDisplay:
    """A bar for all runs and one for each run under way, with its loss and its throughput in tokens/s."""

    def __init__(self) -> None:
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=terminal,
            expand=True,
            disable=not terminal.is_terminal,
        )
        self._total = self.bars.add_task("all runs", total=None, figures="")
        self._running: dict[str, TaskID] = {}
        self._lines: dict[str, str] = {}
        self._steps_done: dict[str, int] = {}
        self._steps, self._started = 0, time.monotonic()

    def start(self, steps: int) -> None:
        """`steps`: optimizer steps of all runs together."""
        self._steps, self._started = steps, time.monotonic()
        self._steps_done.clear()
        self.bars.reset(self._total, total=steps)

    def update(self, label: str, step: int, steps: int, loss: float | None, tokens_per_second: float | None) -> None:
        """A run reached `step` of `steps`; `loss` in nats, None until the first is known."""
        if label not in self._running:
            self._running[label] = self.bars.add_task(label, total=steps, figures="")
        figures = "" if loss is None else f"loss {loss:.3f}"
        if tokens_per_second is not None:
            figures += f"  {tokens_per_second:,.0f} tokens/s"
        self.bars.update(self._running[label], completed=step, figures=figures)
        self._lines[label] = f"{label}: step {step:,} of {steps:,}  {figures}".rstrip()
        self._count(label, step)

    def finish(self, label: str, steps: int, outcome: str) -> None:
        """A run is done; prints its outcome."""
        if label in self._running:
            self.bars.remove_task(self._running.pop(label))
        self._lines.pop(label, None)
        self._count(label, steps)
        console.print(f"{label}: {outcome}", highlight=False)

    def lines(self) -> list[str]:
        """The same for a log."""
        done, elapsed = sum(self._steps_done.values()), time.monotonic() - self._started
        left = f", about {_clock(elapsed / done * (self._steps - done))} left" if done else ""
        whole = f"{done:,} of {self._steps:,} steps{left}"
        return [whole, *(f"  {line}" for line in self._lines.values())]

    def _count(self, label: str, step: int) -> None:
        self._steps_done[label] = step
        self.bars.update(self._total, completed=sum(self._steps_done.values()))


@contextmanager
def training_display() -> Iterator[TrainingDisplay]:
    """Show the progress of training runs while the body runs; on Ctrl-C, say that they can be continued."""
    display = TrainingDisplay()
    try:
        with display.bars, _log_lines(display.lines):
            yield display
    except KeyboardInterrupt:
        terminal.print("stopped; run the same command again to continue", highlight=False)
        raise  # Typer exits with code 130


@contextmanager
def _log_lines(lines: Callable[[], list[str]]) -> Iterator[None]:
    """Without a terminal, print `lines()` every LOG_SECONDS, from a thread: a long step must not look like a hang."""
    if terminal.is_terminal:
        yield
        return
    ended = threading.Event()
    log = Console(file=terminal.file, quiet=terminal.quiet)  # stays, where the body replaces sys.stderr

    def print_lines() -> None:
        while not ended.wait(LOG_SECONDS):
            for line in lines():
                log.print(line, highlight=False, soft_wrap=True)

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _clock(seconds: float) -> str:
    """`0:07`, `12:30`, `3:05:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
