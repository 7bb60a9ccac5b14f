"""What a run shows while it runs."""

import pytest

from tilewise.train.screen import Screen

NUMBERS = {"loss": 1.5, "scale": 14.3, "eta_s": 7.0}


def run(screen: Screen) -> None:
    with screen:
        screen.step(0, 2, {})
        screen.step(1, 2, NUMBERS)
        screen.part("embedding emoji", 3, 9)
        screen.live.refresh()
        screen.part("embedding emoji", 9, 9)
        screen.step(2, 2, NUMBERS)


def test_bars_where_someone_watches(monkeypatch, capsys):
    """One for the steps, and one for what is done on the side for as long as it takes."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(shown=True)
    run(screen)
    out = capsys.readouterr().out
    assert "training" in out
    assert "1.5000" in out
    assert "embedding emoji" in out
    assert "3/9" in out
    assert [task.description for task in screen.bars.tasks] == ["training"]
    assert "s left" not in out


def test_lines_now_and_then_elsewhere(monkeypatch, capsys):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(Screen, "QUIET_S", -1.0)
    run(Screen(shown=True))
    assert capsys.readouterr().out.splitlines() == [
        "step 1/2  loss 1.5000  scale 14.3  7 s left",
        "embedding emoji: 3/9",
        "step 2/2  loss 1.5000  scale 14.3  7 s left",
    ]
    monkeypatch.setattr(Screen, "QUIET_S", 1e9)
    run(Screen(shown=True))
    assert capsys.readouterr().out.splitlines() == ["step 2/2  loss 1.5000  scale 14.3  7 s left"]


@pytest.mark.parametrize("watched", [True, False])
def test_names_of_data_are_no_markup(watched, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1") if watched else monkeypatch.delenv("FORCE_COLOR", False)
    monkeypatch.setattr(Screen, "QUIET_S", -1.0)
    with Screen(shown=True) as screen:
        screen.part("data/[0-9].tar[/x]", 3, 9)
        screen.live.refresh()
        screen.say("to [bold]")
    out = capsys.readouterr().out
    assert "data/[0-9].tar[/x]" in out
    assert "to [bold]" in out


def test_steps_of_minutes_have_an_end(monkeypatch):
    """How long the rest takes is known whatever a step takes."""
    screen, now = Screen(shown=True), [0.0]
    monkeypatch.setattr(screen.bars, "get_time", lambda: now[0])
    for step in range(4):
        screen.step(step, 10, {})
        now[0] += 300.0
    assert screen.bars.tasks[0].time_remaining == pytest.approx(7 * 300.0)


def test_other_ranks_show_nothing(capsys):
    screen = Screen(shown=False)
    run(screen)
    screen.say("something")
    assert capsys.readouterr().out == ""


def test_bars_are_gone_after_an_error(monkeypatch, capsys):
    """A bar that is left running hides the cursor and draws over the error."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    screen = Screen(shown=True)
    monkeypatch.setattr(screen, "step", lambda *of: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(screen)
    assert not screen.live.is_started
    capsys.readouterr()
