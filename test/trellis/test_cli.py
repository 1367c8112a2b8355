"""The `trellis` command, but for `serve`, which has tests of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trellis import cli

NUMBERS = dict.fromkeys(
    [
        "requests",
        "running_requests",
        "waiting_requests",
        "aborted",
        "refused",
        "prompt_tokens",
        "cached_tokens",
        "computed_prompt_tokens",
        "sampled_tokens",
        "forced_tokens",
        "forward_passes",
        "drafted_tokens",
        "accepted_draft_tokens",
        "pool_tokens",
        "free_tokens",
        "evictable_tokens",
        "protected_tokens",
        "private_tokens",
    ],
    0,
)


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trellis", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("trellis ")


def test_an_unknown_command_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["nonsense"])
    assert error.value.code == 2
    assert "nonsense" in capsys.readouterr().err


def test_without_a_server_the_message_says_where_it_looked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stats", "--url", "127.0.0.1:9"]) == 1
    message = capsys.readouterr().err
    assert "http://127.0.0.1:9/server_info" in message
    assert "--url" in message


def test_the_summary_adds_up() -> None:
    info: dict[str, Any] = {**NUMBERS, "hit_rate": 0.25, "sampled_tokens": 7, "forced_tokens": 3}
    info["grammars"] = {"compiled": 5, "refused": 2, "cancelled": 1}
    text = cli.summary(info)
    assert "10 tokens, of them 3 forced and 7 sampled" in text
    assert "25%" in text
    assert "5 compiled, 2 refused, 1 given up" in text


def test_serve_finds_a_policy_in_the_folder_where_it_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "from trellis.runtime.scheduler import Policy\nmine = Policy(lambda queue: queue.number)\n"
    (tmp_path / "policies_of_a_user.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    arguments = ["serve", "--model-path", "no-such-model", "--schedule-policy"]
    assert cli.main([*arguments, "policies_of_a_user:mine"]) == 2
    assert "no-such-model" in capsys.readouterr().err, "the policy was found, the model was not"
    assert cli.main([*arguments, "policies_of_a_user:yours"]) == 2
    assert "has no attribute 'yours'" in capsys.readouterr().err


@pytest.mark.model
@pytest.mark.server
def test_stats_and_flush_talk_to_a_server(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stats", "--url", server_url]) == 0
    assert "slots" in capsys.readouterr().out
    assert cli.main(["stats", "--url", server_url, "--json"]) == 0
    assert '"pool_tokens"' in capsys.readouterr().out
    assert cli.main(["flush", "--url", server_url.removeprefix("http://")]) == 0
    assert "freed_tokens" in capsys.readouterr().out
