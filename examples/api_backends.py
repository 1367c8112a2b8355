"""One program on the APIs of others (pip install 'trellis-lm[openai]', or [anthropic], or [litellm]).

python examples/api_backends.py openai gpt-4.1-mini                  # the key is in OPENAI_API_KEY
python examples/api_backends.py anthropic claude-sonnet-4-5          # ... in ANTHROPIC_API_KEY
python examples/api_backends.py litellm bedrock/anthropic.claude-3-haiku
python examples/api_backends.py openai smollm2-135m --base-url http://127.0.0.1:30000/v1 --dialect trellis
python examples/api_backends.py openai smollm2-135m --base-url http://127.0.0.1:30000/v1 --dialect trellis \\
    --api completions                                                # several gens out of one call
"""

from __future__ import annotations

import argparse
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from trellis import (
    Anthropic,
    Backend,
    LiteLLM,
    OpenAI,
    ProgramState,
    assistant,
    function,
    gen,
    select,
    set_default_backend,
    system,
    user,
)


class Planet(BaseModel):
    moons: Annotated[int, Field(ge=0, le=999)]
    kind: Literal["rock", "gas", "ice"]


@function
def describe(s: ProgramState, planet: str) -> None:
    """For chat APIs: text inside roles, gens in the assistant's messages."""
    s += system("You are an astronomer. Be brief.")
    s += user(f"What is {planet} like?") + assistant(gen("text", max_tokens=60))
    s += user("As a record, please.") + assistant(gen("record", schema=Planet, max_tokens=100))
    s += user("Can one stand on it?") + assistant(select("standing", ["yes", "no"]))


@function(num_api_spec_tokens=24)
def sheet(s: ProgramState, planet: str) -> None:
    """For completions APIs: what the first gen's call writes beyond its line answers the others, where it fits."""
    s += "Name: Earth\nMoons: 1\nKind: rock\n\nName: Jupiter\nMoons: 95\nKind: gas\n\n"
    s += f"Name: {planet}\nMoons:" + gen("moons", stop="\n", max_tokens=8)
    s += "\nKind:" + gen("kind", stop="\n", max_tokens=8) + "\n"


def main(planet: str = "Mars", completions: bool = False) -> ProgramState:
    program = sheet if completions else describe
    state = program.run(planet, temperature=0)
    print(state.text())
    print(state.report())
    return state


def backend_of(arguments: argparse.Namespace) -> Backend:
    if arguments.backend == "anthropic":
        return Anthropic(arguments.model, arguments.base_url)
    if arguments.backend == "litellm":
        return LiteLLM(arguments.model, arguments.base_url)
    return OpenAI(arguments.model, arguments.base_url, api=arguments.api, dialect=arguments.dialect)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", choices=["openai", "anthropic", "litellm"])
    parser.add_argument("model")
    parser.add_argument("--base-url", help="another server than the provider's own")
    parser.add_argument("--api", default="auto", choices=["auto", "chat", "completions"])
    parser.add_argument("--dialect", default="openai", choices=["openai", "trellis", "vllm"])
    arguments = parser.parse_args()
    with backend_of(arguments) as chosen:
        set_default_backend(chosen)
        main(completions=not chosen.speaks_messages)
