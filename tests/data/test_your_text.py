"""docs/your_text.md does what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.data.prepare_tokens import _parser
from hpctrain.data.tokens import TokenSet
from tests.data.packed import contents
from tests.data.tokenized import make_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "your_text.md").read_text(encoding="utf-8")


def _block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found[1]


def test_the_commands_of_the_page_work_on_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "calls").mkdir()
    (tmp_path / "calls" / "2025-03.jsonl").write_text(_block("json"), encoding="utf-8")
    make_tokenizer(tmp_path / "qwen2_5_32b")
    [command] = re.findall(r"^    python -m hpctrain (data tokens .*)$", PAGE, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    assert "left out: 0 empty, 0 malformed" in capsys.readouterr().out
    exec(compile(_block("python"), "your_text.md", "exec"), {})
    assert TokenSet("packed/train").num_documents == 2


def test_the_page_lists_every_option_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(--[\w-]+)[^|]*\| ([^|]*?) ?\|", PAGE, re.MULTILINE))
    for action in _parser()._actions:
        if action.option_strings and action.dest != "help":
            [option] = action.option_strings
            assert option in rows
            if isinstance(action.default, str | int | float) and option not in ("--processes", "--json"):
                assert rows[option] == str(action.default)


def test_the_page_names_the_files_of_a_packed_folder(token_folder: Path) -> None:
    for name in contents(token_folder):
        plain = re.sub(r"-\d+", "-000000", Path(name).name)
        assert plain in PAGE
