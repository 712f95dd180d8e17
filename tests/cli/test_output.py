"""Results for people: settings are shown as they are."""

from kvmosaic.cli import output
from kvmosaic.cli.output import print_table, progress_bar


def test_brackets_are_no_markup(capsys):
    text = "document [INST] Read. [/INST] [/b] [red]"
    print_table("title", ["sink prefix", "kl"], [(text, 0.25)], json=False)
    assert text in capsys.readouterr().out
    with progress_bar(1) as steps:
        steps.start(text)
        steps.done()


def test_a_log_shows_progress_as_lines(capsys, monkeypatch):
    monkeypatch.setattr(output, "SECONDS_PER_LINE", 0)
    with progress_bar(2) as steps:
        steps.start("examples [INST]")
        steps.done()
        steps.reach(2)
    assert capsys.readouterr().err.split("\n")[:3] == [f"{n} of 2 examples [INST]" for n in range(3)]


def test_a_log_has_few_lines_of_progress(capsys):
    with progress_bar(1000) as steps:
        for _ in range(1000):
            steps.done()
    assert "of 1000" not in capsys.readouterr().err
