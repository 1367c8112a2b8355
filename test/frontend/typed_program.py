"""What a type checker knows of a program. ``test_typing.py`` runs mypy --strict on this file: it must find nothing, and as
it warns of every ``type: ignore`` that ignores nothing, each of these marks a mistake that it must see."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from typing_extensions import assert_type

from trellis import AsyncProgramState, Gen, ProgramState, function, gen, select


class Person(BaseModel):
    name: str
    age: int


@dataclass
class Point:
    x: int


person = gen("person", schema=Person, max_tokens=50)
people = gen("people", schema=Person, n=3)
several = gen("several", type=list[Person])
age = gen("age", type=int, temperature=0)
ages = gen(type=int, n=2)
day = gen("day", type=datetime.date)
point = gen("point", type=Point)
words = gen("words", max_tokens=5, stop_regex=r"\n", logit_bias={5: 1.0}, logprobs=True)
lines = gen("lines", n=2, regex="[a-z]+")
level: Gen[Literal["low", "high"]] = gen("level", type=Literal["low", "high"])
answer = select("answer", ["yes", "no"])

assert_type(person, Gen[Person])
assert_type(people, Gen[list[Person]])
assert_type(several, Gen[list[Person]])
assert_type(age, Gen[int])
assert_type(ages, Gen[list[int]])
assert_type(day, Gen[datetime.date])
assert_type(point, Gen[Point])
assert_type(words, Gen[str])
assert_type(lines, Gen[list[str]])
assert_type(gen("x", schema={"type": "object"}), Gen[Any])


def samples(n: int) -> None:
    assert_type(gen("x", type=int, n=n), Gen[Any])  # a list if n is more than 1, or else a number


def read(s: ProgramState) -> None:
    assert_type(s[person], Person)
    assert_type(s[person].age, int)
    assert_type(s[people], list[Person])
    assert_type(s[age], int)
    assert_type(s[words], str)
    assert_type(s[answer], str)
    assert_type(s["person"], Any)
    assert_type(s.get("person", Person), Person)
    assert_type(s.get("ages", list[int]), list[int])
    assert_type(s.get(level), Literal["low", "high"])
    s[age].upper()  # type: ignore[attr-defined]
    print(s[person].agee)  # type: ignore[attr-defined]
    text: str = s[person]  # type: ignore[assignment]
    number: int = s.get("person", Person)  # type: ignore[assignment]
    print(text, number)


async def read_async(s: AsyncProgramState) -> None:
    assert_type(await s[person], Person)
    assert_type(await s[words], str)
    (await s[age]).upper()  # type: ignore[attr-defined]


@function
def program(s: ProgramState, topic: str) -> None:
    s += f"About {topic}: " + person + " aged " + age + "\n"
    read(s)
    s += 5  # type: ignore[arg-type]


async def run() -> None:
    assert_type(await program.run_async("tea"), ProgramState)
    assert_type(await program.run_async("tea", stream=True), AsyncProgramState)
    assert_type(await program.run_batch_async([("tea",)]), list[ProgramState])


gen("x", max_token=3)  # type: ignore[call-overload]
gen("x", temperature="hot")  # type: ignore[call-overload]
gen("x", logit_bias=["a"])  # type: ignore[call-overload]
