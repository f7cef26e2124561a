"""How a table is written."""

from scripts.figures.tables import ResultsFile, Section, format_section, format_words

SECTION = Section("Title", "Note.", ("what",))


def measured(gpu, commit=None):
    return ResultsFile({"environment": {"gpus": [gpu], "commit": commit, "packages": {"torch": "3"}}}, "results/a.json")


def test_a_machine_that_all_rows_share_is_said_once():
    rows = measured("X1", "0123456789").sign([("a",), ("b",)])
    assert format_section(SECTION, rows) == (
        "**Title.** Note. Measured on X1, torch 3.\n\n"
        "| what | commit and file |\n| --- | --- |\n"
        "| a | [0123456](results/a.json) |\n| b | [0123456](results/a.json) |"
    )


def test_different_machines_have_a_column():
    rows = [*measured("X1").sign([("a",)]), *measured("X2").sign([("b",)])]
    assert format_section(SECTION, rows) == (
        "**Title.** Note.\n\n"
        "| what | machine | commit and file |\n| --- | --- | --- |\n"
        "| a | X1, torch 3 | [results/a.json](results/a.json) |\n"
        "| b | X2, torch 3 | [results/a.json](results/a.json) |"
    )


def test_folders_are_no_settings():
    assert format_words(["model=dino", "data.root=x", "logger=csv"]) == "`model=dino`"
    assert format_words(["data.root=x"]) == "as given"
