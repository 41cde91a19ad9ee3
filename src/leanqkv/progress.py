"""Progress of long work: a bar with the time left on a terminal, a line every 15 seconds in a log.

Both go to standard error, so that standard output holds results alone.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

LOG_SECONDS = 15.0
# With several processes, the first one reports. `console` is for results, `terminal` for progress and remarks.
QUIET = os.environ.get("RANK", "0") != "0"
console, terminal = (Console(stderr=errors, quiet=QUIET, highlight=False, markup=False) for errors in (False, True))


class Bar:
    """One line of progress: what is being done, how much of it is done, and of how much."""

    def __init__(self, bars: Progress, description: str, in_bytes: bool):
        self._bars, self._in_bytes = bars, in_bytes
        self._task = bars.add_task(description, total=None)

    def __call__(self, done: int, total: int) -> None:
        task = self._bars.tasks[-1]
        if task.total is not None and (done < task.completed or total != task.total):
            self._bars.reset(self._task)  # another count: what it took to get here says nothing about it
        self._bars.update(self._task, completed=done, total=total)

    @property
    def description(self) -> str:
        """The current phase."""
        return self._bars.tasks[-1].description

    def describe(self, description: str) -> None:
        """Say what is being done now."""
        self._bars.update(self._task, description=description)

    def show(self, description: str, done: int, total: int) -> None:
        """Say what is being done now, and how much of it is done."""
        self.describe(description)
        self(done, total)

    def start(self, description: str) -> None:
        """Begin another phase, with a count and a clock of its own."""
        earlier, self._task = self._task, self._bars.add_task(description, total=None)
        self._bars.remove_task(earlier)

    def line(self) -> str:
        """The same for a log."""
        task = self._bars.tasks[-1]
        if not task.total:
            return f"{task.description}, {_clock(task.elapsed or 0)} so far"
        if self._in_bytes:
            return f"{task.description}: {task.completed / 1e6:,.0f} of {task.total / 1e6:,.0f} MB{_time_left(task)}"
        return f"{task.description}: {task.completed:,} of {task.total:,}{_time_left(task)}"


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
        self._all_runs = self.bars.add_task("all runs", total=None, figures="")
        self._running: dict[str, TaskID] = {}
        self._steps_done: dict[str, int] = {}
        self._steps_before: dict[str, int] = {}  # at a run's first report: steps of an earlier start took no time here

    def start(self, steps: int) -> None:
        """`steps`: optimizer steps of all runs together."""
        self._steps_done.clear()
        self._steps_before.clear()
        self.bars.reset(self._all_runs, total=steps)

    def update(self, label: str, step: int, steps: int, loss: float | None, tokens_per_second: float | None) -> None:
        """A run reached `step` of `steps`; `loss` in nats, None until the first is known."""
        if label not in self._running:
            self._running[label] = self.bars.add_task(label, total=steps, figures="")
        figures = "" if loss is None else f"loss {loss:.3f}"
        if tokens_per_second is not None:
            figures += f"  {tokens_per_second:,.0f} tokens/s"
        self.bars.update(self._running[label], completed=step, figures=figures)
        self._count(label, step)

    def finish(self, label: str, steps: int, outcome: str) -> None:
        """A run is done; prints its outcome."""
        if label in self._running:
            self.bars.remove_task(self._running.pop(label))
        self._count(label, steps)
        console.print(f"{label}: {outcome}")

    def lines(self) -> list[str]:
        """The same for a log."""
        whole, *runs = self.bars.tasks
        return [
            f"{whole.completed:,} of {whole.total or 0:,} steps{_time_left(whole, sum(self._steps_before.values()))}",
            *(f"  {r.description}: step {r.completed:,} of {r.total:,}  {r.fields['figures']}".rstrip() for r in runs),
        ]

    def _count(self, label: str, step: int) -> None:
        self._steps_done[label] = step
        self._steps_before.setdefault(label, step)
        self.bars.update(self._all_runs, completed=sum(self._steps_done.values()))


@contextmanager
def training_display() -> Iterator[TrainingDisplay]:
    """Show the progress of training runs while the body runs; on Ctrl-C, say that they can be continued."""
    display = TrainingDisplay()
    with continued_when_repeated(), display.bars, _log_lines(display.lines):
        yield display


@contextmanager
def continued_when_repeated() -> Iterator[None]:
    """On Ctrl-C, say that rerunning the command resumes here."""
    try:
        yield
    except KeyboardInterrupt:
        terminal.print("stopped; run the same command again to continue")
        raise  # Typer exits with code 130


@contextmanager
def _log_lines(lines: Callable[[], list[str]]) -> Iterator[None]:
    """Without a terminal, print `lines()` every LOG_SECONDS, from a thread: a long step must not look like a hang."""
    if terminal.is_terminal:
        yield
        return
    ended = threading.Event()
    # It stays, where the body replaces sys.stderr.
    log = Console(file=terminal.file, quiet=terminal.quiet, highlight=False, markup=False)

    def print_lines() -> None:
        while not ended.wait(LOG_SECONDS):
            for line in lines():
                log.print(line, soft_wrap=True)

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _time_left(task: Task, before: float = 0) -> str:
    """At the speed since the start, when `before` was done; nothing until something is done."""
    done = task.completed - before
    if not done or task.elapsed is None:
        return ""
    return f", about {_clock(task.elapsed / done * (task.remaining or 0))} left"


def _clock(seconds: float) -> str:
    """`0:07`, `12:30`, `3:05:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
