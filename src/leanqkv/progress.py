"""What a person sees while something long runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class TrainingDisplay:
    """A bar for everything and one for each run under way, with loss and tokens/s; plain lines where no terminal is."""

    def __init__(self, console: Console):
        self.console = console
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self.total = self.bars.add_task("all runs", total=None, figures="")
        self.running: dict[str, TaskID] = {}
        self.steps_done: dict[str, int] = {}

    def start(self, steps: int) -> None:
        """`steps` is the number of optimizer steps of all runs together."""
        self.steps_done.clear()
        self.bars.reset(self.total, total=steps)

    def update(self, label: str, step: int, steps: int, loss: float | None, tokens_per_second: float | None) -> None:
        if label not in self.running:
            self.running[label] = self.bars.add_task(label, total=steps, figures="")
        figures = "" if loss is None else f"loss {loss:.3f}"
        if tokens_per_second is not None:
            figures += f"  {tokens_per_second:,.0f} tokens/s"
        self.bars.update(self.running[label], completed=step, figures=figures)
        self._count(label, step)

    def finish(self, label: str, steps: int, outcome: str) -> None:
        if label in self.running:
            self.bars.remove_task(self.running.pop(label))
        self._count(label, steps)
        self.console.print(f"{label}: {outcome}", highlight=False)

    def _count(self, label: str, step: int) -> None:
        self.steps_done[label] = step
        self.bars.update(self.total, completed=sum(self.steps_done.values()))


@contextmanager
def counting(console: Console, description: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that is told how much is done, of how much; none where no terminal is."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(description, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def training_display(console: Console) -> Iterator[TrainingDisplay]:
    display = TrainingDisplay(console)
    with display.bars:
        yield display
