"""Programs in the original system's language, run in a process of their own with that client on the path.

    python original_client_programs.py URL OUTPUT

Each program leaves its states in OUTPUT, a JSON object of program name to list of states: the text, the variables, what
the server said of each, and the error if there was one. Only public names of the client are used.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import sglang as sgl

PREFIX = (
    "Bread is one of the oldest foods that people make. It needs flour, water, salt, yeast and some patience. "
    * 3
)
QUESTIONS = ["What does bread need?", "Who makes bread?", "Is bread old?"]
REVIEWS = ["I would buy it again at once.", "It broke on the first day."]
SHEET = r'\{"age": [1-9][0-9]?, "house": "(red|blue)"\}'
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
)
METHODS = {
    "mean": sgl.token_length_normalized,
    "greedy": sgl.greedy_token_selection,
    "unconditional": sgl.unconditional_likelihood_normalized,
}


@sgl.function
def few_shot(s, country):
    s += "Q: What is the capital of Italy?\nA: Rome\nQ: What is the capital of Spain?\nA: Madrid\n"
    s += "Q: What is the capital of Greece?\nA: Athens\n"
    s += "Q: What is the capital of " + country + "?\nA:" + sgl.gen("answer", max_tokens=8, stop="\n")


@sgl.function
def judge(s, review, method):
    s += "Review: A delight from beginning to end.\nSentiment: positive\n"
    s += "Review: " + review + "\nSentiment:"
    options = [" positive", " negative", " a bit of both, I would say"]
    s += sgl.gen("label", choices=options, choices_method=METHODS[method])


@sgl.function
def character(s):
    s += "Ann, as a JSON object: " + sgl.gen("sheet", max_tokens=40, regex=SHEET)


@sgl.function
def number(s):
    s += "Two and two are " + sgl.gen("number", dtype=int, max_tokens=4)


@sgl.function
def person(s):
    s += "A person as JSON: " + sgl.gen("json", max_tokens=60, json_schema=SCHEMA)


@sgl.function
def tips(s):
    s += PREFIX + "\n"
    s.sync()  # fork() sends the text ahead only if it is there already
    branches = s.fork(len(QUESTIONS))
    for i, question in enumerate(QUESTIONS):
        branches[i] += "Q: " + question + "\nA:" + sgl.gen("tip", max_tokens=8, stop="\n")
    branches.join()
    for question, tip in zip(QUESTIONS, s["tip"], strict=True):
        s += question + tip + "\n"
    s += "In short:" + sgl.gen("summary", max_tokens=6)
    return branches


@sgl.function
def statements(s):
    s += "Please memorize these statements.\n"
    branches = s.fork(3)
    branches += lambda i: f"Statement {i}: {QUESTIONS[i]}\n"
    branches.join(mode="concate_and_append")
    s += "Statement 3:" + sgl.gen("next", max_tokens=8)


@sgl.function
def chat(s, first, second):
    s += sgl.system("You answer in one sentence.")
    s += sgl.user(first)
    s += sgl.assistant(sgl.gen("one", max_tokens=16))
    with s.user():
        s += second
    with s.assistant():
        s += "Well, " + sgl.gen("two", max_tokens=12)


@sgl.function
def story(s):
    s += "Once upon a time there was a king who" + sgl.gen("story", max_tokens=12)


@sgl.function
def logprobs(s):
    s += "One two three four" + sgl.gen(
        "next",
        max_tokens=4,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )


@sgl.function
def long_enough(s):
    s += "Q: What is the capital of France?\nA:" + sgl.gen(
        "answer", min_tokens=12, max_tokens=16, stop_token_ids=[198]
    )


@sgl.function
def mistake(s):
    s += "A letter, twice: " + sgl.gen("x", max_tokens=4, regex=r"(a|b)\1")


def record(state: Any, *names: str) -> dict[str, Any]:
    """A state as data. Its variables are asked for only if nothing failed: this client forgets the cause."""
    text, error = state.text(), state.error()
    fine = error is None
    return {
        "text": text,
        "error": None if fine else str(error),
        "values": {name: state[name] for name in names} if fine else {},
        "meta": {name: state.get_meta_info(name) for name in names} if fine else {},
    }


def run_few_shot() -> list[dict[str, Any]]:
    countries = [{"country": name} for name in ("France", "Japan", "Egypt", "Peru")]
    states = few_shot.run_batch(countries, temperature=0, num_threads=2, progress_bar=False)
    return [record(state, "answer") for state in states]


def run_judge() -> list[dict[str, Any]]:
    states = [judge.run(review=review, method=method) for review in REVIEWS for method in METHODS]
    return [record(state, "label") for state in states]


def run_tips() -> list[dict[str, Any]]:
    sgl.flush_cache()
    state = tips.run(temperature=0)
    branches = [record(state.ret_value[i], "tip") for i in range(len(QUESTIONS))]
    return [{**record(state, "tip", "summary"), "prefix": PREFIX + "\n", "branches": branches}]


def run_chat() -> list[dict[str, Any]]:
    backend = sgl.RuntimeEndpoint(sys.argv[1])
    backend.chat_template = sgl.lang.chat_template.get_chat_template("chatml")
    asked = {"first": "What is bread made of?", "second": "And what is cheese made of?"}
    state = chat.run(**asked, temperature=0, backend=backend)
    return [{**record(state, "one", "two"), "messages": state.messages()}]


def run_default_roles() -> list[dict[str, Any]]:
    """The roles as this client writes them for a model that it does not know."""
    state = chat.run(first="What is bread made of?", second="And cheese?", temperature=0)
    return [{**record(state, "one", "two"), "messages": state.messages()}]


def run_story() -> list[dict[str, Any]]:
    """Whole, streamed, streamed by variable, and streamed to a coroutine."""
    whole = story.run(temperature=0)
    streamed = story.run(temperature=0, stream=True)
    pieces = list(streamed.text_iter())
    by_name = story.run(temperature=0, stream=True)
    named = list(by_name.text_iter("story"))

    async def collect() -> list[str]:
        return [piece async for piece in story.run(temperature=0, stream=True).text_async_iter("story")]

    awaited = asyncio.run(collect())
    states = [record(state, "story") for state in (whole, streamed, by_name)]
    return [{**states[0], "streams": [pieces, named, awaited]}, *states[1:]]


def run_cache() -> list[dict[str, Any]]:
    """A prefix that was cached by name; then the cache is flushed."""
    backend = sgl.global_config.default_backend
    sgl.flush_cache()
    backend.cache_prefix(PREFIX)

    @sgl.function
    def after(s):
        s += PREFIX + " It" + sgl.gen("x", max_tokens=1)

    warm = after.run(temperature=0)
    warm.sync()
    sgl.flush_cache()
    return [record(warm, "x"), record(after.run(temperature=0), "x")]


def run_long_enough() -> list[dict[str, Any]]:
    """The older client has no ``min_tokens``."""
    has_it = "min_tokens" in signature(sgl.gen).parameters
    return [record(long_enough.run(temperature=0), "answer")] if has_it else []


def run_info() -> list[dict[str, Any]]:
    backend = sgl.global_config.default_backend
    information = backend.get_server_info if hasattr(backend, "get_server_info") else backend.get_server_args
    return [{"name": backend.get_model_name(), "info": information()}]


PROGRAMS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "few_shot": run_few_shot,
    "judge": run_judge,
    "character": lambda: [record(character.run(temperature=0), "sheet")],
    "person": lambda: [record(person.run(temperature=0), "json")],
    "tips": run_tips,
    "statements": lambda: [record(statements.run(temperature=0), "next")],
    "chat": run_chat,
    "default_roles": run_default_roles,
    "story": run_story,
    "logprobs": lambda: [record(logprobs.run(temperature=0), "next")],
    "long_enough": run_long_enough,
    "mistake": lambda: [record(mistake.run(temperature=0), "x")],
    "cache": run_cache,
    "info": run_info,
    # The last one: an older client adds the stop strings of its dtypes to those of every program after it.
    "number": lambda: [record(number.run(temperature=0), "number")],
}

if __name__ == "__main__":
    sgl.set_default_backend(sgl.RuntimeEndpoint(sys.argv[1]))
    found = {name: run() for name, run in PROGRAMS.items()}
    Path(sys.argv[2]).write_text(json.dumps({"version": sgl.__version__, **found}), "utf-8")
