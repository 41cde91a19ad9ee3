"""Progress: a bar on a terminal, lines in a log, nothing on the standard output but results."""

import importlib.util
import io
import re
import time

import pytest
from rich.console import Console

from leanqkv import progress


@pytest.fixture
def clock():
    """The seconds that progress is told, in a list of one."""
    return [1000.0]


@pytest.fixture
def log(monkeypatch, clock):
    """What a log of the standard error holds; a line comes every hundredth of a second."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=False, width=80, get_time=lambda: clock[0])
    monkeypatch.setattr(progress, "terminal", console)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.01)
    return stream


@pytest.fixture
def screen(monkeypatch):
    """What a terminal is sent."""
    stream = io.StringIO()
    monkeypatch.setattr(progress, "terminal", Console(file=stream, force_terminal=True, width=80))
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.01)
    return stream


def wait_for(stream: io.StringIO, text: str) -> str:
    """The lines of a log, once one of them holds `text`."""
    deadline = time.monotonic() + 10
    while not re.search(text, stream.getvalue()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return next(line for line in stream.getvalue().splitlines() if re.search(text, line))


def test_a_log_gets_lines_with_the_time_left(log, clock, capsys):
    with progress.progress_bar("reading") as bar:
        assert wait_for(log, "so far") == "reading, 0:00 so far"
        clock[0] += 30
        bar(1_000, 4_000)
        assert wait_for(log, "1,000") == "reading: 1,000 of 4,000, about 1:30 left"
        clock[0] += 3 * 3600
        assert wait_for(log, "9:") == "reading: 1,000 of 4,000, about 9:01:30 left"
        bar.describe("writing")
        bar(4_000, 4_000)
        assert wait_for(log, "writing: 4,000") == "writing: 4,000 of 4,000, about 0:00 left"
    ended = log.getvalue()
    time.sleep(0.05)
    assert log.getvalue() == ended, "lines after the end"
    assert capsys.readouterr() == ("", "")


def test_bytes_are_megabytes(log):
    with progress.progress_bar("reading", in_bytes=True) as bar:
        bar(0, 2_500_000_000)
        assert wait_for(log, "MB") == "reading: 0 of 2,500 MB"


def test_another_phase_has_a_count_and_a_clock_of_its_own(log, clock):
    with progress.progress_bar("reading") as bar:
        clock[0] += 3600
        bar(3, 4)
        bar.start("writing")
        assert wait_for(log, "writing") == "writing, 0:00 so far"
        clock[0] += 5
        bar.show("writing shards", 1, 2)
        assert wait_for(log, "1 of 2") == "writing shards: 1 of 2, about 0:05 left"


@pytest.mark.parametrize("count", [(1, 4), (5, 6)])
def test_another_count_has_a_clock_of_its_own(log, clock, count):
    """Fewer are done, or there are others to do."""
    with progress.progress_bar("fitting") as bar:
        clock[0] += 3600
        bar(4, 4)
        bar(*count)
        clock[0] += 10
        remaining = f"{10 / count[0] * (count[1] - count[0]):02.0f}"
        assert wait_for(log, f"{count[0]} of {count[1]}, about 0:{remaining}")


def test_a_bar_beside_another_is_for_logs_alone(screen):
    with progress.progress_bar("tasks", log_only=True) as bar:
        bar(1, 2)
        time.sleep(0.1)
    assert screen.getvalue() == ""


def test_nothing_is_known_before_something_is_done(log):
    """No time left from nothing done, and no division by it."""
    with progress.progress_bar("reading") as bar:
        bar(0, 10)
        assert wait_for(log, "of 10") == "reading: 0 of 10"


def test_a_terminal_gets_a_bar_and_no_lines(screen, capsys):
    with progress.progress_bar("reading") as bar:
        bar(30, 40)
        bar.describe("writing")
        time.sleep(0.3)
    shown = screen.getvalue()
    assert "\x1b[" in shown, "a bar moves the cursor"
    assert "writing" in shown and "30/40" in shown
    assert "30 of 40" not in shown, "a line for logs"
    assert capsys.readouterr() == ("", "")


def test_the_bar_ends_with_an_error(log):
    with pytest.raises(KeyboardInterrupt), progress.progress_bar("reading") as bar:
        bar(1, 2)
        raise KeyboardInterrupt
    ended = log.getvalue()
    time.sleep(0.05)
    assert log.getvalue() == ended


def test_runs_side_by_side_in_a_log(log, clock, capsys):
    with progress.training_display() as display:
        display.start(200)
        display.update("tiny", 0, 100, None, None)
        display.update("tiny+skipv1", 0, 100, None, None)
        clock[0] += 10
        display.update("tiny", 30, 100, None, None)
        display.update("tiny+skipv1", 20, 100, 5.4321, 12_345.6)
        wait_for(log, "12,346")
        lines = display.lines()
        assert lines[0] == "50 of 200 steps, about 0:30 left"
        assert lines[1:] == [
            "  tiny: step 30 of 100",
            "  tiny+skipv1: step 20 of 100  loss 5.432  12,346 tokens/s",
        ]
        display.finish("tiny", 100, "validation loss 5.0000")
        assert display.lines()[0].startswith("120 of 200 steps")
        assert display.lines()[1:] == [lines[2]], "a run that is over has no line"
    out, err = capsys.readouterr()
    assert out == "tiny: validation loss 5.0000\n", "an outcome is a result"
    assert err == ""


def test_steps_of_an_earlier_start_took_no_time(log, clock):
    """Of a comparison that goes on, one run is finished and another one is in its middle."""
    with progress.training_display() as display:
        display.start(300)
        display.finish("finished", 100, "validation loss 5.0000")
        display.update("begun", 60, 100, None, None)
        assert display.lines()[0] == "160 of 300 steps", "nothing says how long the rest takes"
        clock[0] += 10
        display.update("begun", 80, 100, None, None)
        assert display.lines()[0] == "180 of 300 steps, about 1:00 left"


def test_a_second_set_of_runs_counts_from_zero(log):
    """A comparison trains its grid of learning rates first."""
    with progress.training_display() as display:
        display.start(10)
        display.finish("grid", 10, "done")
        display.start(40)
        display.update("final", 10, 40, None, None)
        assert display.lines()[0].startswith("10 of 40 steps")


def test_ctrl_c_says_how_to_continue(log, capsys):
    with pytest.raises(KeyboardInterrupt), progress.training_display():
        raise KeyboardInterrupt
    assert log.getvalue() == "stopped; run the same command again to continue\n"


def test_runs_on_a_terminal(screen, capsys):
    with progress.training_display() as display:
        display.start(200)
        display.update("tiny", 30, 100, 5.4321, 12_345.6)
        time.sleep(0.3)
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen.getvalue())
    assert "all runs" in shown and "30/200" in shown and "30/100" in shown
    assert "loss 5.432" in shown and "12,346 tokens/s" in shown
    assert "of 200 steps" not in shown, "a line for logs"


@pytest.mark.parametrize(("rank", "reports"), [("0", True), ("1", False)])
def test_of_several_processes_the_first_reports(rank, reports, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    spec = importlib.util.spec_from_file_location("leanqkv.progress", progress.__file__)
    of_this_rank = importlib.util.module_from_spec(spec)  # the rank is read when the module is loaded
    spec.loader.exec_module(of_this_rank)
    of_this_rank.LOG_SECONDS = 0.01
    with of_this_rank.progress_bar("reading") as bar:
        bar(1, 2)
        time.sleep(0.1)
    with of_this_rank.training_display() as display:
        display.start(10)
        display.finish("run", 10, "done")
    out, err = capsys.readouterr()
    assert out == ("run: done\n" if reports else "")
    assert ("reading: 1 of 2" in err) == reports
    assert reports or err == ""
