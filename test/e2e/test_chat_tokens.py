"""The language and the chat endpoint send the same tokens, and another chat template changes both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from trellis import (
    ChatFormat,
    Engine,
    InvalidRequestError,
    RuntimeEndpoint,
    assistant,
    function,
    gen,
    get_chat_template,
    system,
    user,
)

pytestmark = pytest.mark.model
MODEL = "smollm2-135m"


@function
def chat(s, subject):
    s += system(f"You know all about {subject}.")
    s += user("Name one thing.")
    s += assistant(gen("one", max_tokens=12))
    s += user("  Another?\n")
    s += assistant(gen("two", max_tokens=12))


@pytest.mark.server
@pytest.mark.parametrize("subject", ["rivers", "the number 42", "日本"])
def test_the_chat_endpoint_finds_all_that_a_program_said_in_the_cache(server_url: str, subject: str) -> None:
    with RuntimeEndpoint(server_url) as backend:
        state = chat.run(subject, backend=backend, temperature=0)
        messages = state.messages()
    body = {"model": MODEL, "messages": messages[:-1], "max_tokens": 1, "temperature": 0}
    usage = httpx.post(f"{server_url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
    assert usage["prompt_tokens"] == state.meta("two").counts.prompt_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_an_engine_takes_another_template_by_name() -> None:
    with Engine(MODEL, chat_template="llama-2", max_total_tokens=2048, context_length=512) as engine:
        state = chat.run("rivers", backend=engine)
        tokenizer = engine.core.tokenizer
        assert state.text().startswith(
            "<s>[INST] <<SYS>>\nYou know all about rivers.\n<</SYS>>\n\nName one thing. [/INST]"
        )
        rendered = tokenizer.render_chat([{"role": "user", "content": " a "}])
        assert rendered == "<s>[INST] a [/INST]"
        assert tokenizer.chat_format() == get_chat_template("llama-2")


def test_a_template_that_is_none_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"^chat_template: there is no such file, and 'nope' is not known; known:"
    ):
        Engine(MODEL, chat_template="nope")
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}", encoding="utf-8")
    command = [sys.executable, "-m", "trellis.launch_server", "--model-path", MODEL, "--port", "0"]
    done = subprocess.run(
        [*command, "--chat-template", str(broken)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert f"error: --chat-template: {broken}, line 1: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.server
def test_an_endpoint_takes_another_format(server_url: str) -> None:
    form = ChatFormat({"user": ("Q: ", "\n"), "assistant": ("A:", "\n")}, stop=("\n",))

    @function
    def ask(s):
        s += user("What is two and two?")
        s += assistant(gen("x", max_tokens=24))

    with RuntimeEndpoint(server_url, chat_template=form) as backend:
        state = ask.run(backend=backend, temperature=0)
    assert state.text() == f"Q: What is two and two?\nA:{state['x']}\n"
    assert "\n" not in state["x"]
