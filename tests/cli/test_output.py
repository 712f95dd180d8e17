"""Results for people: settings are shown as they are."""

from kvmosaic.cli.output import print_table, progress_bar


def test_brackets_are_no_markup(capsys):
    text = "document [INST] Read. [/INST] [/b] [red]"
    print_table("title", ["sink prefix", "kl"], [(text, 0.25)], json=False)
    assert text in capsys.readouterr().out
    with progress_bar(1) as steps:
        steps.start(text)
        steps.done()
