"""The same few-shot prompt for many inputs at once. The examples are computed once and shared.

python examples/few_shot_batch.py
"""

from __future__ import annotations

from trellis import ProgramState, function, gen, set_default_backend

SHOTS = [("France", "Paris"), ("Japan", "Tokyo"), ("Egypt", "Cairo"), ("Peru", "Lima")]
COUNTRIES = ["Italy", "Germany", "Spain", "Russia", "China", "Greece", "Austria", "Portugal"]


@function
def capital(s: ProgramState, country: str) -> None:
    for known, answer in SHOTS:
        s += f"Country: {known}\nCapital: {answer}\n\n"
    s += f"Country: {country}\nCapital:" + gen("capital", max_tokens=8, stop="\n")


def main() -> list[ProgramState]:
    states = capital.run_batch([(country,) for country in COUNTRIES], temperature=0, progress_bar=True)
    for country, state in zip(COUNTRIES, states, strict=True):
        counts = state.meta("capital").counts
        cached = f"{counts.cached_tokens} of {counts.prompt_tokens} prompt tokens cached"
        print(f"{country:10}{state['capital'].strip():12}{cached}")
    return states


if __name__ == "__main__":
    from common import choose_backend

    with choose_backend() as backend:
        set_default_backend(backend)
        main()
